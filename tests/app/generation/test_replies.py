"""The choices of one request: the events before a failure come first, and the best candidates when all have ended."""

import pytest

from app.errors import AppError, InvalidGrammar, ReplyAborted, ReplyFailed
from app.generation.cache_report import CacheReport
from app.generation.events import Batch, ChatEvent, ReplyEnd, TextDelta, TokenCounts
from app.generation.options import GenerationOptions, PreparedRequest
from app.generation.replies import Choices
from app.generation.request_log import PrefillLog
from engine.request import FinishReason, TokenLogprobs, TokenSources
from engine.sampling_params import SamplingParams

GREETING: tuple[int, ChatEvent] = (0, TextDelta("Hello"))
OTHERS: tuple[int, ChatEvent] = (1, TextDelta("Good day"))


def end(finish: FinishReason, error: str = "") -> tuple[int, ChatEvent]:
    return 0, ReplyEnd(finish, None, 0, 3, CacheReport(TokenSources(computed=3)), 1, 0.1, 0.2, error=error)


def taken(*batches: Batch, count: int = 2, reports: bool = True) -> tuple[list[Batch], AppError | None]:
    """What a caller gets of these batches, and the error after it."""
    options = GenerationOptions([SamplingParams()] * 2, count, reports_logprobs=reports)
    prepared = PreparedRequest([(1, 2, 3)], options, grammar_field="format")
    choices = Choices(prepared, TokenCounts(), PrefillLog("scripted"))
    returned: list[Batch] = []
    for batch in batches:
        good, failure = choices.select(batch)
        returned += [good] if good else []
        if failure is not None:
            return returned, failure
    best = choices.best()
    return [*returned, *([best] if best else [])], None


@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.LENGTH])
def test_replies_that_end_well_are_returned_as_they_come(finish: FinishReason) -> None:
    batches = [GREETING, OTHERS], [OTHERS, end(finish)], [OTHERS]
    assert taken(*batches) == ([*batches], None)


def test_events_that_come_with_a_failure_are_returned_before_it() -> None:
    failing = [OTHERS, GREETING, end(FinishReason.ERROR, "out of memory"), OTHERS]
    batches, error = taken([GREETING], failing, [OTHERS])
    assert batches == [[GREETING], [OTHERS, GREETING]]
    assert isinstance(error, ReplyFailed)
    assert "out of memory" in error.message


def test_a_failure_that_comes_alone_returns_nothing() -> None:
    batches, error = taken([end(FinishReason.ABORT)])
    assert batches == []
    assert isinstance(error, ReplyAborted)


def test_a_grammar_that_is_too_complex_is_blamed_on_its_field() -> None:
    batches, error = taken([GREETING], [end(FinishReason.GRAMMAR, "It is too complex.")])
    assert batches == [[GREETING]]
    assert isinstance(error, InvalidGrammar)
    assert (error.path, error.message) == ("format", "It is too complex.")


def test_the_best_by_the_mean_are_returned_when_all_have_ended() -> None:
    def candidate(number: int, text: str, *logprobs: float) -> Batch:
        tokens = tuple(TokenLogprobs(1, logprob, ()) for logprob in logprobs)
        return [(number, TextDelta(text, tokens)), (number, end(FinishReason.STOP)[1])]

    worse, better = candidate(0, "short", -1.0), candidate(1, "long", -0.25, -0.75, -0.5)
    batches, error = taken(worse[:1], better, worse[1:], count=1)
    assert error is None
    assert batches == [[(0, event) for _, event in better]]
    batches, _ = taken(worse, better, count=1, reports=False)
    assert batches == [[(0, TextDelta("long")), (0, better[1][1])]]


def test_a_candidate_that_fails_returns_nothing() -> None:
    batches, error = taken([OTHERS, (1, end(FinishReason.STOP)[1])], [end(FinishReason.ERROR)], count=1)
    assert batches == []
    assert isinstance(error, ReplyFailed)
