"""Clients that disconnect in any phase: their requests end at once, and no tasks or KV blocks are left."""

import asyncio
import json
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from app.generation.conversation import Message
from app.generation.template import ChatTemplateRenderer
from app.text.tokenizer import Tokenizer
from tests.app.server.live_server import ControlledRunner, LiveServer, controlled_engine, descriptors
from tests.support.hash_model import expected_output
from tests.support.processes import until

TASKS_OF_A_REPLY = 3  # one for the connection, one for the request, and one that waits for a disconnect


@pytest.fixture
def server(tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> Iterator[LiveServer]:
    """A server that runs at most four requests at the same time. Other requests wait."""
    engine, _ = controlled_engine(tokenizer.vocab_size, running=4, budget=64)
    with LiveServer("hash", engine, tokenizer, renderer) as server:
        # Complete one request first, because the first request creates tasks that remain.
        asyncio.run(read_all(server, message(max_tokens=1)))
        yield server
        until(lambda: not engine.has_work)
    engine.assert_empty()


def runner_of(server: LiveServer) -> ControlledRunner:
    runner = server.engine._runner
    assert isinstance(runner, ControlledRunner)
    return runner


def message(content: str = "Hi", **fields: Any) -> bytes:
    """Return a chat request as HTTP bytes."""
    body = {"model": "hash", "messages": [{"role": "user", "content": content}], "ignore_eos": True, **fields}
    encoded = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(encoded)}\r\n\r\n"
    return head.encode() + encoded


async def send(server: LiveServer, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(data)
    await writer.drain()
    return reader, writer


async def read_all(server: LiveServer, data: bytes) -> bytes:
    reader, writer = await send(server, data)
    reply = await reader.read()
    writer.close()
    await writer.wait_closed()
    return reply


async def hang_up(writer: asyncio.StreamWriter, *, reset: bool = False) -> None:
    if reset:
        writer.transport.abort()
    else:
        writer.close()
        await writer.wait_closed()


async def eventually(condition: Callable[[], bool]) -> None:
    await asyncio.to_thread(until, condition)


@pytest.mark.share(2, "phase")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("phase", ["prefill", "mid-stream", "queued"])
def test_disconnect_ends_all_tasks_of_a_request(server: LiveServer, phase: str, n: int, stream: bool) -> None:
    """The tasks must end without an event from the engine, which is blocked in a step."""
    runner = runner_of(server)
    idle = server.tasks()

    async def leave(steps: threading.Semaphore) -> None:
        blockers = []
        if phase == "queued":
            blockers = [await send(server, message(f"Blocker {number}", max_tokens=1500)) for number in range(4)]
            await asyncio.to_thread(server.step_until, steps, running=4, waiting=0)
        busy, plans = server.tasks(), runner.plans
        allowed = 7 if phase == "mid-stream" else 0
        for _ in range(allowed):
            steps.release()
        content = "A prompt of several steps. " * (100 if phase == "prefill" else 1)
        _, writer = await send(server, message(content, max_tokens=1500, n=n, stream=stream))
        await eventually(lambda: server.tasks() >= busy + TASKS_OF_A_REPLY)
        await eventually(lambda: phase == "queued" or runner.plans > plans + allowed)
        await hang_up(writer)
        await eventually(lambda: server.tasks() <= busy)
        for _, blocker in blockers:
            await hang_up(blocker)
        await eventually(lambda: server.tasks() <= idle)

    with runner.held() as steps:
        asyncio.run(leave(steps))
    until(lambda: not server.engine.has_work)
    server.engine.assert_empty()


def test_200_random_disconnects_leave_no_tasks_and_no_blocks(server: LiveServer) -> None:
    chance = random.Random(5)
    asked_tokens = 1000
    before = runner_of(server).computed_tokens
    idle, open_files = server.tasks(), descriptors()

    async def leave() -> None:
        sent = message(
            "Why? " * chance.choice((1, 40, 300)),
            max_tokens=asked_tokens,
            n=chance.choice((1, 1, 4)),
            stream=chance.random() < 0.7,
        )
        point = chance.choice(("headers", "body", "sent", "queued", "reading", "reading"))
        cut = {"headers": chance.randint(0, 120), "body": chance.randint(len(sent) - 50, len(sent) - 1)}
        reader, writer = await send(server, sent[: cut.get(point, len(sent))])
        if point == "queued":
            await asyncio.sleep(chance.random() / 20)
        if point == "reading":
            reading = asyncio.create_task(reader.read(chance.randint(1, 3000)))
            await asyncio.wait([reading], timeout=chance.random())
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        await hang_up(writer, reset=chance.random() < 0.5)

    async def all_leave() -> bytes:
        kept = asyncio.create_task(read_all(server, message("Stay with me", max_tokens=50)))
        await asyncio.gather(*(leave() for _ in range(200)))
        return await kept

    reply = asyncio.run(all_leave())
    until(lambda: not server.engine.has_work and server.tasks() <= idle and descriptors() <= open_files)
    server.engine.assert_empty()
    # Complete replies would take a hundred times more tokens. How soon a disconnect is noticed varies, but no request
    # may run to its end.
    assert runner_of(server).computed_tokens - before < 200 * asked_tokens // 2
    prompt = server.call(server.service.encode([Message("user", "Stay with me")]))
    answered = json.loads(reply.partition(b"\r\n\r\n")[2])["choices"][0]["message"]["content"]
    assert answered == server.service.tokenizer.decode(expected_output(prompt, 50))
