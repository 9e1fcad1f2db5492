"""Replies of one request: events before a failure, and the selection of the best candidates."""

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


def selected(*batches: Batch, count: int = 2, reports: bool = True) -> tuple[list[Batch], AppError | None]:
    """Return the events that the caller gets for `batches`, and the error after them."""
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
def test_successful_replies_are_returned_as_they_arrive(finish: FinishReason) -> None:
    batches = [GREETING, OTHERS], [OTHERS, end(finish)], [OTHERS]
    assert selected(*batches) == ([*batches], None)


def test_events_before_a_failure_are_returned() -> None:
    failing = [OTHERS, GREETING, end(FinishReason.ERROR, "out of memory"), OTHERS]
    batches, error = selected([GREETING], failing, [OTHERS])
    assert batches == [[GREETING], [OTHERS, GREETING]]
    assert isinstance(error, ReplyFailed)
    assert "out of memory" in error.message


def test_failure_without_earlier_events_returns_no_events() -> None:
    batches, error = selected([end(FinishReason.ABORT)])
    assert batches == []
    assert isinstance(error, ReplyAborted)
    assert error.message == "The server stopped this reply"


def test_grammar_error_names_its_field() -> None:
    batches, error = selected([GREETING], [end(FinishReason.GRAMMAR, "It is too complex.")])
    assert batches == [[GREETING]]
    assert isinstance(error, InvalidGrammar)
    assert (error.path, error.message) == ("format", "It is too complex.")


def test_best_candidates_by_mean_logprob_are_returned() -> None:
    def candidate(number: int, text: str, *logprobs: float) -> Batch:
        tokens = tuple(TokenLogprobs(1, logprob, ()) for logprob in logprobs)
        return [(number, TextDelta(text, tokens)), (number, end(FinishReason.STOP)[1])]

    worse, better = candidate(0, "short", -1.0), candidate(1, "long", -0.25, -0.75, -0.5)
    batches, error = selected(worse[:1], better, worse[1:], count=1)
    assert error is None
    assert batches == [[(0, event) for _, event in better]]
    batches, _ = selected(worse, better, count=1, reports=False)
    assert batches == [[(0, TextDelta("long")), (0, better[1][1])]]


def test_failed_candidate_returns_no_events() -> None:
    batches, error = selected([OTHERS, (1, end(FinishReason.STOP)[1])], [end(FinishReason.ERROR)], count=1)
    assert batches == []
    assert isinstance(error, ReplyFailed)
