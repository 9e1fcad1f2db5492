"""Drafter: follows the running requests, and drafts the next tokens of each from earlier text or with a draft model."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from engine.draft import NO_DRAFT, Draft, Source
from engine.drafting.acceptance import MAX_DRAFT, Acceptance
from engine.drafting.corpus import LEAD, Corpora
from engine.drafting.draft_model import DraftModel
from engine.drafting.model_drafts import ModelDrafts
from engine.drafting.plan import Room, best_count, choose_drafts
from engine.drafting.token_index import MAX_MATCH, TokenIndex
from engine.errors import DeviceLost
from engine.request import Origin, Request, RequestStatus

log = logging.getLogger(__name__)

MATCHED_TOKENS = 2  # maximum number of drafted tokens per matched token


@dataclass(slots=True)
class _Followed:
    """A request whose tokens are indexed, and the draft for its next tokens."""

    request: Request
    history: TokenIndex
    indexes: Sequence[tuple[Source, TokenIndex]]  # of the history, after that of the reply that the client predicts
    draft: Draft = NO_DRAFT
    expects_draft: bool | None = None  # see `Drafter.expects_draft`; None: not computed for this draft
    steps: int = 0  # number of steps that have added tokens since the first draft

    @property
    def run_length(self) -> float:
        """Number of tokens that a step adds without drafts: more than one if a grammar forces tokens."""
        own = len(self.request.output_ids) - self.request.drafts.accepted
        return max(1.0, own / (1 + self.steps))

    @classmethod
    def of(cls, request: Request) -> Self:
        history, predicted = TokenIndex(), TokenIndex()
        predicted.extend(request.params.prediction or ())
        indexes = ((Source.PREDICTION, predicted), (Source.HISTORY, history))
        return cls(request, history, indexes if predicted else indexes[1:])


class Drafter:
    """Drafts from the reply that the client predicts, the request's own tokens, and earlier replies with the same cache
    salt, and with a draft model.
    """

    def __init__(self, seconds: Callable[[int], float]) -> None:
        """`seconds` returns the expected time of a step by its number of tokens."""
        self._seconds = seconds
        self.acceptance = Acceptance()
        self._model: ModelDrafts | None = None
        self._corpora = Corpora()
        self._followed: dict[int, _Followed] = {}  # keyed by request id

    def draft_with(self, model: DraftModel) -> None:
        """Draft with a small model too, where this is faster."""
        self._model = ModelDrafts(model, self.acceptance, self._seconds)

    def has_drafts(self, requests: Iterable[Request]) -> bool:
        """Whether there may be drafts for any of these requests, which are followed up to their last tokens."""
        found = [request for request in requests if self.draft(request).token_ids]
        return bool(found) or self._model is not None

    def expects_draft(self, request: Request) -> bool:
        """Whether a draft after the next token, which is still being sampled, is likely to pay if the request runs
        alone.
        """
        draft, followed = self.draft(request), self._followed[request.id]
        if followed.expects_draft is None:  # a plan asks several times
            reached = tuple(self.acceptance.reach(draft))[1:]
            count, _ = best_count(reached, self._seconds, Room(decoding=1, most=len(reached)))
            followed.expects_draft = count > 0 or (self._model is not None and self._model.expects_draft(request))
        return followed.expects_draft

    def close(self) -> None:
        """Close the draft model."""
        if self._model is not None:
            self._model.close()
        self._model = None

    def choose(self, requests: Sequence[Request], room: Room) -> Mapping[int, Draft]:
        """Return the drafts to verify in the next step, by request id. `requests` are those that may have drafts."""
        drafts = {request.id: self.draft(request) for request in requests}
        if room.prefills or room.ahead:
            return {}
        runs = {it.id: self._followed[it.id].run_length for it in requests if it.constraint is not None}
        plan = choose_drafts(drafts, self.acceptance, self._seconds, room, runs)
        if self._model is None:
            return plan.drafts
        try:
            by_model = self._model.choose(requests, plan, room)
        except DeviceLost:
            raise
        except Exception:
            log.exception("the draft model failed, and is not used any more")
            self._model = None
            return plan.drafts
        for request_id, draft in by_model.items():
            drafts[request_id] = max(drafts[request_id], draft, key=lambda it: sum(self.acceptance.reach(it)))
        return choose_drafts(drafts, self.acceptance, self._seconds, room, runs).drafts

    def draft(self, request: Request) -> Draft:
        """Return a draft for the tokens after the last known one; NO_DRAFT if nothing matches."""
        followed = self._followed.get(request.id)
        if followed is None:
            followed = self._followed[request.id] = _Followed.of(request)
        known = len(followed.history)
        if known < request.num_tokens or not known:
            new = request.token_ids(known, request.num_tokens)
            if known:
                followed.steps += 1
                self.acceptance.observe(followed.draft, new)
            followed.history.extend(new)
            followed.draft, followed.expects_draft = self._find(followed), None
        return followed.draft

    def drop_ended(self, running: Mapping[int, Request]) -> None:
        """Stop following requests that have ended, and add their replies to the corpus of their cache salt."""
        for request_id in [it for it in self._followed if it not in running]:
            request = self._followed[request_id].request
            if request.status is RequestStatus.FINISHED:
                del self._followed[request_id]
                if self._model is not None:
                    self._model.drop(request_id)
                lead = list(request.prompt_ids[-LEAD:])
                self._corpora.add(request.origin.cache_salt, [*lead, *request.output_ids])

    def forget(self, token_ids: Sequence[int], origin: Origin, kept: int) -> None:
        """See `KVMemory.forget`. All earlier replies with the same cache salt are dropped."""
        self._corpora.forget(origin.cache_salt)
        if self._model is not None:
            self._model.forget(token_ids, origin, kept)

    def _find(self, followed: _Followed) -> Draft:
        """Return the draft after the longest match of all sources, the first source among equals."""
        best, suffix = NO_DRAFT, followed.history.token_ids[-MAX_MATCH:]
        for source, index in followed.indexes:
            match = index.match(suffix)
            if match is not None and match.length > best.match_length:
                tokens = index.tokens_after(match, _length(match.length), repeats=source is Source.HISTORY)
                best = Draft(source, match.length, tokens)
        if corpus := self._corpora.of(followed.request.origin.cache_salt):
            length, tokens = corpus.find(suffix, MAX_DRAFT)
            if length > best.match_length:
                best = Draft(Source.CORPUS, length, tokens[: _length(length)])
        return best


def _length(match_length: int) -> int:
    return min(MAX_DRAFT, MATCHED_TOKENS * match_length)
