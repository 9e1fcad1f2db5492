"""Token streams with the hash model: events arrive together, in order, and readers take turns."""

import asyncio
import threading

import pytest

from app.generation.token_streams import MAX_BATCH, TokenStream, TokenStreams
from engine.errors import PromptTooLong
from engine.request import PROGRAM, FinishReason, Origin, Request, RequestStatus, ServiceClass, TokenEvent
from engine.sampling_params import SamplingParams
from tests.app.server.live_server import controlled_engine
from tests.support.hash_model import VOCABULARY, expected_output, hash_engine
from tests.support.processes import HANGING_SECONDS

PROMPT = tuple(range(1000, 1040))
NO_END: frozenset[int] = frozenset()
BACKGROUND = Origin(ServiceClass.BACKGROUND)


def submit(stream: TokenStream, last: int = 7, max_tokens: int = 100, origin: Origin = PROGRAM) -> Request:
    return stream.submit((*PROMPT, last), SamplingParams(max_tokens=max_tokens), NO_END, origin)


async def finished(streams: TokenStreams, *requests: Request) -> None:
    """Wait until the engine has finished all requests and the streams have the last event of each."""
    while (
        streams.num_running
        or streams.requests()
        or any(request.status is not RequestStatus.FINISHED for request in requests)
    ):
        await asyncio.sleep(0)


async def read(stream: TokenStream) -> list[list[TokenEvent]]:
    return [events async for events in stream]


def tokens_of(batches: list[list[TokenEvent]], request: Request) -> list[int | None]:
    events = [event for batch in batches for event in batch if event.request_id == request.id]
    return [event.token_id for event in events]


def test_reader_gets_waiting_events_in_order() -> None:
    async def main() -> None:
        async with TokenStreams(hash_engine()[0]) as streams:
            with streams.open() as stream:
                request = submit(stream)
                await finished(streams, request)
                batches = await read(stream)
        assert tokens_of(batches, request) == expected_output(request.prompt_ids, 100)
        assert [len(batch) for batch in batches] == [MAX_BATCH] * (100 // MAX_BATCH) + [100 % MAX_BATCH]
        assert [event.finish for batch in batches for event in batch][-2:] == [None, FinishReason.LENGTH]

    asyncio.run(main())


def test_token_is_delivered_before_the_next_step() -> None:
    async def main() -> None:
        engine, runner = controlled_engine(VOCABULARY)
        runner.steps_allowed = steps = threading.Semaphore(0)
        async with TokenStreams(engine) as streams:
            with streams.open() as stream:
                request = submit(stream, max_tokens=20)
                batches = []
                for _ in range(20):
                    steps.release()
                    batches.append(await asyncio.wait_for(anext(stream), HANGING_SECONDS))
        assert [len(batch) for batch in batches] == [1] * 20
        assert tokens_of(batches, request) == expected_output(request.prompt_ids, 20)

    asyncio.run(main())


@pytest.mark.parametrize("pause", [0.01, 10 * HANGING_SECONDS])
def test_pause_delays_all_but_the_first_and_last_tokens(pause: float) -> None:
    async def main() -> None:
        engine, runner = controlled_engine(VOCABULARY)
        runner.steps_allowed = steps = threading.Semaphore(0)
        async with TokenStreams(engine) as streams:
            with streams.open(pause) as stream:
                request = submit(stream, max_tokens=20)
                steps.release()
                batches = [await asyncio.wait_for(anext(stream), HANGING_SECONDS)]
                steps.release(9)
                if pause < HANGING_SECONDS:
                    while sum(map(len, batches)) < 10:
                        batches.append(await asyncio.wait_for(anext(stream), HANGING_SECONDS))
                steps.release(10)
                batches += await asyncio.wait_for(read(stream), HANGING_SECONDS)
        assert len(batches[0]) == 1
        assert pause < HANGING_SECONDS or [len(batch) for batch in batches] == [1, 19]
        assert tokens_of(batches, request) == expected_output(request.prompt_ids, 20)

    asyncio.run(main())


def test_last_event_is_not_delayed() -> None:
    async def main() -> None:
        async with TokenStreams(hash_engine()[0]) as streams:
            with streams.open(pause=10 * HANGING_SECONDS) as stream:
                request = submit(stream)
                batches = await asyncio.wait_for(read(stream), HANGING_SECONDS)
        assert tokens_of(batches, request) == expected_output(request.prompt_ids, 100)

    asyncio.run(main())


def test_slow_readers_take_turns() -> None:
    async def main() -> None:
        async with TokenStreams(hash_engine()[0]) as streams:
            with streams.open() as one, streams.open() as other:
                await finished(streams, submit(one), submit(other))
                turns: list[str] = []

                async def take(name: str, stream: TokenStream) -> None:
                    async for _ in stream:
                        turns.append(name)  # noqa: PERF401  # when it is appended is the point

                await asyncio.gather(take("one", one), take("other", other))
        assert turns == ["one", "other"] * (len(turns) // 2)
        assert len(turns) > 2

    asyncio.run(main())


def test_stream_ends_with_its_last_request() -> None:
    async def main() -> None:
        async with TokenStreams(hash_engine()[0]) as streams:
            with streams.open() as stream:
                requests = [submit(stream, number, 10 * (1 + number)) for number in range(5)]
                batches = await read(stream)
        for number, request in enumerate(requests):
            told = [token for token in tokens_of(batches, request) if token is not None]
            assert told == expected_output(request.prompt_ids, 10 * (1 + number))

    asyncio.run(main())


def test_single_request_of_a_stream_can_be_aborted() -> None:
    async def main() -> None:
        engine, _ = hash_engine()
        async with TokenStreams(engine) as streams:
            with streams.open() as stream:
                ended, kept = submit(stream, 1, 20_000), submit(stream, 2, 20)
                batches = [await anext(stream)]
                stream.abort(ended.id)
                stream.abort(ended.id)
                batches += await read(stream)
                told = [token for token in tokens_of(batches, kept) if token is not None]
                assert told == expected_output(kept.prompt_ids, 20)
            await finished(streams, ended)
        assert len(ended.output_ids) < 20_000
        engine.assert_empty()

    asyncio.run(main())


def test_leaving_a_stream_aborts_its_requests() -> None:
    async def main() -> None:
        engine, runner = controlled_engine(VOCABULARY)
        async with TokenStreams(engine) as streams:
            with runner.held(), streams.open() as stream:  # no step ends before the stream is closed
                begun = submit(stream, 1, 900)
                with pytest.raises(PromptTooLong):
                    stream.submit((), SamplingParams(), NO_END)
            await finished(streams, begun)
        assert len(begun.output_ids) < 900
        engine.assert_empty()

    asyncio.run(main())


def test_stop_ends_each_request_once() -> None:
    async def main() -> None:
        engine, runner = controlled_engine(VOCABULARY)
        streams = TokenStreams(engine)
        await streams.start()
        with streams.open() as stream:
            with runner.held() as steps:
                requests = [submit(stream, number, 900) for number in range(4)]
                steps.release(10)
                await anext(stream)
                stopping = asyncio.create_task(streams.stop())
                await asyncio.sleep(0)  # all requests end here
            await stopping
            events = [event for batch in await read(stream) for event in batch]
            for request in requests:
                ends = [event.finish for event in events if event.request_id == request.id and event.finish]
                assert ends == [FinishReason.ABORT]

    asyncio.run(main())


def test_suspended_requests_continue_with_the_next_engine() -> None:
    """One is aborted meanwhile. A later request gets another id."""

    async def main() -> None:
        engine, runner = controlled_engine(VOCABULARY)
        runner.steps_allowed = steps = threading.Semaphore(10)
        first, then = TokenStreams(engine), TokenStreams(controlled_engine(VOCABULARY)[0])
        await first.start()
        with first.open() as stream, first.open() as leaving:
            request, aborted = submit(stream, origin=BACKGROUND), submit(leaving, origin=BACKGROUND)
            batches = [await asyncio.wait_for(anext(stream), HANGING_SECONDS)]
            assert not first.can_suspend(1)
            assert first.can_suspend(2)
            with first.open() as urgent:
                submit(urgent)
                assert not first.can_suspend(3)
            while runner.plans <= 10:  # the last of these steps is held
                await asyncio.sleep(0.001)
            commands = first._thread._commands
            before = commands.qsize()
            suspending = asyncio.create_task(first.suspend())
            while commands.qsize() == before:
                await asyncio.sleep(0.001)
            steps.release()
            await suspending
            leaving.abort(aborted.id)
            await then.start()
            then.resume(first)
            with then.open() as other:
                late = submit(other, max_tokens=3)
                assert late.id > request.id
                batches += await asyncio.wait_for(read(stream), HANGING_SECONDS)
                await asyncio.wait_for(read(other), HANGING_SECONDS)
            assert [live.id for live in then.requests()] == []
        await then.stop()
        assert tokens_of(batches, request) == expected_output(request.prompt_ids, 100)
        assert len(aborted.output_ids) < 100

    asyncio.run(main())


def test_suspended_requests_end_with_the_reason() -> None:
    async def main() -> None:
        engine, runner = controlled_engine(VOCABULARY)
        runner.steps_allowed = steps = threading.Semaphore(10)
        streams = TokenStreams(engine)
        await streams.start()
        with streams.open() as stream:
            submit(stream, max_tokens=2000)
            await asyncio.wait_for(anext(stream), HANGING_SECONDS)
            suspending = asyncio.create_task(streams.suspend())
            while not suspending.done():
                steps.release()
                await asyncio.sleep(0.001)
            await suspending
            streams.end_all(FinishReason.ERROR, "the file is gone")
            last = [event for events in await asyncio.wait_for(read(stream), HANGING_SECONDS) for event in events][-1]
        assert (last.finish, last.error) == (FinishReason.ERROR, "the file is gone")

    asyncio.run(main())
