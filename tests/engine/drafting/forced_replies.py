"""Replies with drafts of known quality, to compare them with the replies without drafts."""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from engine.core import Engine
from engine.draft import NO_DRAFTS, Draft, DraftCounts, Source
from engine.drafting.drafter import Drafter
from engine.drafting.plan import Room
from engine.request import FinishReason, Request, TokenEvent, TokenLogprobs
from engine.sampling_params import SamplingParams

Prompt = tuple[int, ...]


@dataclass(frozen=True)
class Reply:
    """The tokens of a reply, their log-probabilities, and the reason why it ended."""

    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs | None]
    finish: FinishReason | None


@dataclass
class ForcedDrafts(Drafter):
    """Drafts of known quality: each token is the next one of the `replies` with the chance `right`.

    A wrong token follows the same token elsewhere, so that a grammar may allow it, or is the next id.
    """

    replies: Mapping[Prompt, Sequence[Sequence[int]]]  # prompt -> replies that it gets
    right: float
    random: random.Random

    def __post_init__(self) -> None:
        super().__init__(lambda tokens: 1.0)

    def has_drafts(self, requests: Iterable[Request]) -> bool:
        return True

    def expects_draft(self, request: Request) -> bool:
        return True

    def choose(self, requests: Sequence[Request], room: Room) -> dict[int, Draft]:
        # independent of measured times, on which the room depends
        return {request.id: Draft(Source.HISTORY, 3, self._tokens(request)) for request in requests}

    def _tokens(self, request: Request) -> tuple[int, ...]:
        known = request.output_ids
        reply = next(it for it in self.replies[request.prompt_ids] if list(it[: len(known)]) == known)
        coming = range(len(known), min(len(reply), len(known) + self.random.randrange(1, 9)))
        return tuple(reply[it] if self.random.random() < self.right else self._wrong(reply, it) for it in coming)

    def _wrong(self, reply: Sequence[int], index: int) -> int:
        pairs = pairwise(reply)
        others = [second for first, second in pairs if first == reply[index - 1] and second != reply[index]]
        return self.random.choice(others or [(reply[index] + 1) % 97])


def replies(engine: Engine[Any], prompt: Prompt, several: Sequence[SamplingParams], end: int = 3) -> list[Reply]:
    """Return the reply with each of the parameters. Prompts are shared, as by several choices of one request."""
    requests = [engine.request(prompt, params, frozenset({end})) for params in several]
    engine.add(*requests)
    found: dict[int, list[TokenEvent]] = {request.id: [] for request in requests}
    while engine.has_requests:
        for event in engine.step():
            found[event.request_id].append(event)
    engine.assert_empty()
    return [
        Reply(
            [it.token_id for it in events if it.token_id is not None],
            [it.logprobs for it in events if it.token_id is not None],
            events[-1].finish,
        )
        for events in found.values()
    ]


def without_drafts(params: SamplingParams) -> SamplingParams:
    return replace(params, drafts=False)


def drafted(engine: Engine[Any]) -> DraftCounts:
    """Return the number of tokens that the engine has drafted and accepted so far."""
    return sum(engine.state().counters.drafts.values(), NO_DRAFTS)


@contextmanager
def drafts_from(engine: Engine[Any], drafter: Drafter) -> Iterator[None]:
    """Make the engine take its drafts from another drafter."""
    verification = engine._scheduler._verification
    before, verification.drafter = verification.drafter, drafter
    try:
        yield
    finally:
        verification.drafter = before


def replies_with_forced_drafts(
    engine: Engine[Any],
    prompt: Prompt,
    several: Sequence[SamplingParams],
    plain: Sequence[Reply],
    right: float,
    rng: random.Random,
    end: int = 3,
) -> tuple[list[Reply], DraftCounts]:
    """Return the replies with drafts of this quality, and what was drafted and accepted. `plain` has the replies."""
    before = drafted(engine)
    with drafts_from(engine, ForcedDrafts({prompt: [it.token_ids for it in plain]}, right, rng)):
        found = replies(engine, prompt, several, end)
    after = drafted(engine)
    return found, DraftCounts(after.drafted - before.drafted, after.accepted - before.accepted)
