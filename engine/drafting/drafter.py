"""Drafter: follows the running requests, and drafts the next tokens of each from earlier text."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from engine.draft import NO_DRAFT, Draft, Source
from engine.drafting.acceptance import MAX_DRAFT, Acceptance
from engine.drafting.corpus import LEAD, Corpora
from engine.drafting.plan import choose_drafts
from engine.drafting.token_index import MAX_MATCH, TokenIndex
from engine.request import Request, RequestStatus

MATCHED_TOKENS = 2  # maximum number of drafted tokens per matched token


@dataclass(slots=True)
class _Followed:
    """A request whose tokens are indexed, and the draft for its next tokens."""

    request: Request
    history: TokenIndex = field(default_factory=TokenIndex)
    prediction: TokenIndex | None = None
    draft: Draft = NO_DRAFT

    @classmethod
    def of(cls, request: Request) -> Self:
        followed = cls(request)
        if request.params.prediction:
            followed.prediction = TokenIndex()
            followed.prediction.extend(request.params.prediction)
        return followed


class Drafter:
    """Drafts from the request's predicted reply, its own tokens, and earlier replies with the same cache salt."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        """`seconds` returns the expected time of a step by its number of tokens."""
        self._seconds = seconds
        self.acceptance = Acceptance()
        self._corpora = Corpora()
        self._followed: dict[int, _Followed] = {}  # keyed by request id

    def choose(self, requests: Sequence[Request], *, decoding: int, most: int, prefills: bool) -> dict[int, Draft]:
        """Return the drafts to verify in the next step, together at most `most` tokens, by request id.

        `decoding` is the number of requests that decode in the step, those in `requests` included. A step that also
        `prefills` verifies no drafts, because it takes long already.
        """
        drafts = {request.id: self.draft(request) for request in requests}
        if prefills:
            return {}
        return choose_drafts(drafts, self.acceptance, self._seconds, decoding=decoding, most=most)

    def draft(self, request: Request) -> Draft:
        """Return a draft for the tokens after the last known one; NO_DRAFT if nothing matches."""
        followed = self._followed.get(request.id)
        if followed is None:
            followed = self._followed[request.id] = _Followed.of(request)
        known = len(followed.history)
        if known < request.num_tokens or not known:
            new = request.token_ids(known, request.num_tokens)
            if known:
                self.acceptance.observe(followed.draft, new)
            followed.history.extend(new)
            followed.draft = self._find(followed)
        return followed.draft

    def drop_ended(self, running: Mapping[int, Request]) -> None:
        """Stop following requests that have ended, and add their replies to the corpus of their cache salt."""
        for request_id in [it for it in self._followed if it not in running]:
            request = self._followed[request_id].request
            if request.status is RequestStatus.FINISHED:
                del self._followed[request_id]
                lead = list(request.prompt_ids[-LEAD:])
                self._corpora.add(request.origin.cache_salt, [*lead, *request.output_ids])

    def forget(self, salt: str) -> None:
        """Drop the earlier replies with this cache salt."""
        self._corpora.forget(salt)

    def _find(self, followed: _Followed) -> Draft:
        """Return the draft after the longest match of all sources, the first source among equals."""
        return max(self._drafts(followed), key=lambda draft: draft.match_length, default=NO_DRAFT)

    def _drafts(self, followed: _Followed) -> Iterable[Draft]:
        history, request = followed.history, followed.request
        suffix = history.token_ids[-MAX_MATCH:]
        for source, index in ((Source.PREDICTION, followed.prediction), (Source.HISTORY, history)):
            match = index.match(suffix) if index is not None else None
            if index is not None and match is not None:
                tokens = index.tokens_after(match, _length(match.length), repeats=index is history)
                yield Draft(source, match.length, tokens)
        if corpus := self._corpora.of(request.origin.cache_salt):
            length, tokens = corpus.find(suffix, MAX_DRAFT)
            yield Draft(Source.CORPUS, length, tokens[: _length(length)])


def _length(match_length: int) -> int:
    return min(MAX_DRAFT, MATCHED_TOKENS * match_length)
