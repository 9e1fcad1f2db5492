"""Memory that large requests have used is returned to the operating system."""

import asyncio
import threading
from pathlib import Path

import pytest
from starlette.types import Message, Receive, Scope, Send

from app.server import application
from app.server.application import LARGE_REQUEST_BYTES, MemoryTrim
from engine.freed_memory import return_freed_memory
from tests.support.processes import HANGING_SECONDS

SCOPE: Scope = {"type": "http", "method": "POST", "path": "/", "headers": []}


def trims(monkeypatch: pytest.MonkeyPatch, *sizes: tuple[int, int]) -> int:
    """Return how often large requests trim memory, for successive requests of these (body size, reply size) pairs."""
    done: list[bool] = []
    monkeypatch.setattr(application, "return_freed_memory", lambda: done.append(True))
    monkeypatch.setattr(application, "TRIM_DELAY_SECONDS", 0.01)
    handle(*sizes)
    return len(done)


def handle(*sizes: tuple[int, int]) -> None:
    """Handle successive requests of these (body size, reply size) pairs, and wait for the trims that are due."""

    async def main() -> None:
        left = list(sizes)

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await receive()
            await send({"type": "http.response.body", "body": bytes(left.pop(0)[1])})

        async def receive() -> Message:
            return {"type": "http.request", "body": bytes(left[0][0]), "more_body": False}

        async def send(message: Message) -> None:
            pass

        trim = MemoryTrim(app)
        for _ in sizes:
            await trim(SCOPE, receive, send)
        await asyncio.sleep(0.02)
        await asyncio.get_running_loop().shutdown_default_executor()

    asyncio.run(main())


def test_memory_is_returned_after_large_requests_and_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trims(monkeypatch, (LARGE_REQUEST_BYTES, 0)) == 1
    assert trims(monkeypatch, (1000, LARGE_REQUEST_BYTES)) == 1
    assert trims(monkeypatch, (1000, 1000)) == 0


def test_memory_of_concurrent_requests_is_returned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trims(monkeypatch, *[(LARGE_REQUEST_BYTES, 0)] * 5) == 1


def test_memory_is_returned_once_per_period_while_there_are_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[bool] = []
    monkeypatch.setattr(application, "trim", lambda: done.append(True))
    monkeypatch.setattr(application, "TRIM_PERIOD_SECONDS", 0.01)
    for period in range(1, 3):
        handle(*[(1000, 1000)] * 5)
        assert len(done) == period


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


def test_memory_freed_by_a_thread_is_returned_to_the_system() -> None:
    """Allocations that are still in use surround the freed memory."""
    kept: list[bytes] = []

    def work() -> None:
        pieces = [bytes(2000) for _ in range(100_000)]
        kept.extend(pieces[::1000])

    before = resident_bytes()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(HANGING_SECONDS)
    return_freed_memory()
    assert resident_bytes() - before < 50_000_000
