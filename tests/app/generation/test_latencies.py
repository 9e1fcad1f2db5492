"""Latency histograms: each duration is counted in the right bucket and service class."""

import asyncio
from collections.abc import Iterable
from itertools import pairwise

import pytest

from app.generation.latencies import GAP_BOUNDS, REPLY_BOUNDS, Histogram, Latencies
from app.generation.service import ChatService
from app.generation.template import ChatTemplateRenderer
from app.generation.token_streams import TokenStreams
from app.text.tokenizer import Tokenizer
from engine.request import FinishReason, Origin, ServiceClass
from engine.sampling_params import BeamParams, SamplingParams
from tests.app.generation.reply_events import reply_events
from tests.app.server.live_server import Clock, controlled_engine
from tests.support.hash_model import VOCABULARY, expected_output, hash_engine
from tests.support.processes import HANGING_SECONDS

PROMPT = tuple(range(1000, 1040))
BACKGROUND, NORMAL = ServiceClass.BACKGROUND, ServiceClass.NORMAL


def bucket_counts(bounds: Iterable[float], *seconds: float) -> list[int]:
    """Return the counts of `seconds` by bucket."""
    edges = [0.0, *bounds, float("inf")]
    return [sum(low < one <= high for one in seconds) for low, high in pairwise(edges)]


def test_duration_is_counted_at_its_upper_bound() -> None:
    histogram = Histogram((1, 2, 5))
    for seconds in (0.5, 1, 1.5, 2, 5, 5.1, 1e9):
        histogram.observe(seconds)
    assert histogram.counts == [2, 2, 1, 2]
    assert histogram.total_seconds == pytest.approx(1e9 + 15.1)


def test_timer_records_times_of_one_reply() -> None:
    latencies = Latencies()
    timer = latencies.timer(BACKGROUND, 100.0)
    for now in (103.0, 103.025, 103.75):
        timer.record_token(now)
    timer.record_end(FinishReason.LENGTH, 104.0)
    assert latencies.first_token[BACKGROUND].counts == bucket_counts(REPLY_BOUNDS, 3.0)
    assert latencies.between_tokens[BACKGROUND].counts == bucket_counts(GAP_BOUNDS, 0.025, 0.725)
    assert latencies.whole_reply[BACKGROUND].counts == bucket_counts(REPLY_BOUNDS, 4.0)
    assert latencies.between_tokens[BACKGROUND].total_seconds == pytest.approx(0.75)
    others = [latencies.first_token[NORMAL], latencies.between_tokens[NORMAL], latencies.whole_reply[NORMAL]]
    assert not any(sum(histogram.counts) for histogram in others)


@pytest.mark.parametrize("finish", list(FinishReason))
def test_total_time_excludes_aborted_replies(finish: FinishReason) -> None:
    latencies = Latencies()
    latencies.timer(NORMAL, 0.0).record_end(finish, 2.0)
    assert latencies.ends == {reason: reason is finish for reason in FinishReason}
    whole = finish in (FinishReason.STOP, FinishReason.LENGTH)
    assert sum(latencies.whole_reply[NORMAL].counts) == whole


def test_streams_record_latencies() -> None:
    """The prefill takes three steps, of which only the last yields a token. Two more tokens follow."""

    async def main() -> None:
        clock = Clock()
        engine, runner = controlled_engine(VOCABULARY, budget=16)
        async with TokenStreams(engine, clock) as streams:
            with streams.open() as stream, runner.held() as steps:
                stream.submit(PROMPT, SamplingParams(max_tokens=3), frozenset(), Origin(BACKGROUND))
                for seconds in (0.1, 0.1, 0.1, 0.04, 0.004):
                    clock.seconds += seconds
                    steps.release()
                    await asyncio.wait_for(anext(stream), HANGING_SECONDS)
            latencies = streams.latencies
        assert latencies.first_token[BACKGROUND].counts == bucket_counts(REPLY_BOUNDS, 0.3)
        assert latencies.between_tokens[BACKGROUND].counts == bucket_counts(GAP_BOUNDS, 0.04, 0.004)
        assert latencies.whole_reply[BACKGROUND].counts == bucket_counts(REPLY_BOUNDS, 0.344)
        assert latencies.ends[FinishReason.LENGTH] == sum(latencies.ends.values()) == 1

    asyncio.run(main())


def test_each_request_is_counted_once_by_finish_reason(tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> None:
    """Covers the finish reasons: end of reply, stop string, abort, and shutdown."""

    async def main() -> None:
        engine, runner = controlled_engine(VOCABULARY)
        streams = TokenStreams(engine)
        service = ChatService("hash", tokenizer, streams, renderer)
        stop = tokenizer.decode(expected_output(PROMPT, 8), continues_text=True)[-3:]
        await streams.start()
        for params in (SamplingParams(max_tokens=5), SamplingParams(max_tokens=900, stop=(stop,), ignore_eos=True)):
            with runner.held() as steps:
                steps.release(20)  # the second reply must not reach its longest length before it is stopped
                async for _ in reply_events(service, PROMPT, params):
                    pass
        ends = streams.latencies.ends
        assert (ends[FinishReason.LENGTH], ends[FinishReason.STOP]) == (1, 1)
        for _ in range(3):
            with runner.held() as steps, streams.open() as stream:
                request = stream.submit(PROMPT, SamplingParams(max_tokens=900), frozenset())
                steps.release(10)  # the reply must not end by itself before it is aborted
                await anext(stream)
                stream.abort(request.id)
                stream.abort(request.id)
        assert ends[FinishReason.ABORT] == 3
        with streams.open() as stream:
            stream.submit(PROMPT, SamplingParams(max_tokens=900), frozenset())
            await streams.stop()
        assert ends == {
            FinishReason.STOP: 1,
            FinishReason.LENGTH: 1,
            FinishReason.ABORT: 4,
            FinishReason.ERROR: 0,
            FinishReason.GRAMMAR: 0,
        }

    asyncio.run(main())


def test_beam_search_counts_as_one_token() -> None:
    async def main() -> None:
        engine, _ = hash_engine()
        async with TokenStreams(engine) as streams:
            with streams.open() as stream:
                beams = SamplingParams(beams=BeamParams(3, 2), max_tokens=8)
                stream.submit_several(PROMPT, [beams], frozenset())
                events = [event async for batch in stream for event in batch]
            assert sum(event.token_id is not None for event in events) == 16
            assert sum(streams.latencies.first_token[NORMAL].counts) == 2
            assert sum(streams.latencies.between_tokens[NORMAL].counts) == 0

    asyncio.run(main())
