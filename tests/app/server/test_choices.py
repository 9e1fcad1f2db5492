"""The choices of one request: where the engine gives one up, what came before is told first."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from app.generation.cache_report import CacheReport
from app.generation.events import ChatEvent, ReplyEnd, TextDelta
from app.generation.service import ChatService
from app.server.choices import WantedChoices, generate_choices
from app.server.errors import ReplyAborted, ReplyFailed
from app.server.usage import TokenCounts
from engine.request import PROGRAM, FinishReason, TokenLogprobs
from engine.sampling_params import SamplingParams

Batch = list[tuple[int, ChatEvent]]

GREETING: tuple[int, ChatEvent] = (0, TextDelta("Hello"))
OTHERS: tuple[int, ChatEvent] = (1, TextDelta("Good day"))


def end(finish: FinishReason, error: str = "") -> tuple[int, ChatEvent]:
    return 0, ReplyEnd(finish, None, 0, 3, CacheReport(computed=3), 1, 0.1, 0.2, error=error)


class Scripted(ChatService):
    """Yields what it is told to."""

    def __init__(self, *batches: Batch) -> None:
        self.name = "scripted"
        self.batches = batches
        self.closed = False

    async def generate_several(self, *_: object, **__: object) -> AsyncGenerator[Batch]:
        try:
            for batch in self.batches:
                yield batch
        finally:
            self.closed = True


def told(service: Scripted, count: int = 2, *, reports: bool = True) -> tuple[list[Batch], Exception | None]:
    """All that is told, and what is raised behind it."""

    async def collect() -> tuple[list[Batch], Exception | None]:
        batches = []
        try:
            wanted = WantedChoices(count, [SamplingParams()] * 2, reports)
            async for batch in generate_choices(service, [(1, 2, 3)], wanted, PROGRAM, TokenCounts()):
                batches += [batch]
        except (ReplyFailed, ReplyAborted) as error:
            return batches, error
        return batches, None

    return asyncio.run(collect())


@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.LENGTH])
def test_all_is_told_of_replies_that_end_well(finish: FinishReason) -> None:
    service = Scripted([GREETING, OTHERS], [OTHERS, end(finish)], [OTHERS])
    assert told(service) == ([[GREETING, OTHERS], [OTHERS, end(finish)], [OTHERS]], None)


def test_what_came_together_with_a_failure_is_told_before_it() -> None:
    service = Scripted([GREETING], [OTHERS, GREETING, end(FinishReason.ERROR, "out of memory"), OTHERS], [OTHERS])
    batches, error = told(service)
    assert batches == [[GREETING], [OTHERS, GREETING]]
    assert isinstance(error, ReplyFailed)
    assert "out of memory" in error.message
    assert service.closed


def test_before_a_failure_that_comes_alone_nothing_is_told() -> None:
    batches, error = told(Scripted([end(FinishReason.ABORT)]))
    assert batches == []
    assert isinstance(error, ReplyAborted)


def test_the_best_by_the_mean_are_told_when_all_have_ended() -> None:
    def candidate(number: int, text: str, *logprobs: float) -> Batch:
        tokens = tuple(TokenLogprobs(1, logprob, ()) for logprob in logprobs)
        return [(number, TextDelta(text, tokens)), (number, end(FinishReason.STOP)[1])]

    worse, better = candidate(0, "short", -1.0), candidate(1, "long", -0.25, -0.75, -0.5)
    batches, error = told(Scripted(worse[:1], better, worse[1:]), 1)
    assert error is None
    assert batches == [[(0, event) for _, event in better]]
    batches, _ = told(Scripted(worse, better), 1, reports=False)
    assert batches == [[(0, TextDelta("long")), (0, better[1][1])]]


def test_where_a_candidate_fails_none_is_told() -> None:
    batches, error = told(Scripted([OTHERS, (1, end(FinishReason.STOP)[1])], [end(FinishReason.ERROR)]), 1)
    assert batches == []
    assert isinstance(error, ReplyFailed)
