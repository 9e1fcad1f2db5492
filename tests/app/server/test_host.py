"""Shutdown of the HTTP server: the order in which its components stop, and components that do not stop."""

import asyncio
import gc
import io
import random
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from app.errors import InvalidSetting
from app.generation.token_streams import TokenStreams
from app.process.instance import Instance
from app.process.listening import ListeningSockets
from app.progress import LineProgress
from app.server import host, http_server
from app.server.http_server import HTTPServer, server_config
from app.settings.settings import load_settings
from engine.config import EngineConfig
from engine.core import Engine
from engine.errors import DeviceLost, EngineError
from engine.sampling_params import SamplingParams
from tests.support.hash_model import VOCABULARY, HashRunner, HashTicket, hash_engine

PROMPT = (1, 2, 3)


def application(streams: TokenStreams) -> Starlette:
    """Return an application with a route that streams the token events of an endless reply, one per line."""

    async def lines() -> AsyncIterator[str]:
        with streams.open() as stream:
            stream.submit(PROMPT, SamplingParams(temperature=0, ignore_eos=True), frozenset())
            async for events in stream:
                for event in events:
                    yield f"{event.finish.value if event.finish else event.token_id}\n"

    async def reply(request: Request) -> Response:
        return StreamingResponse(lines(), media_type="text/plain")

    async def submit(request: Request) -> Response:
        try:
            with streams.open() as stream:
                stream.submit(PROMPT, SamplingParams(), frozenset())
        except EngineError as problem:
            return PlainTextResponse(problem.message, 503)
        return PlainTextResponse("submitted")

    return Starlette(routes=[Route("/reply", reply), Route("/submit", submit)])


def serve_while(
    engine: Engine[Any],
    body: Callable[[http_server.HTTPServer, httpx.AsyncClient], Awaitable[None]],
    exit_now: Callable[[int], None],
) -> list[str]:
    """Run a server with `engine` while `body` uses it through a client. Returns the recorded callbacks."""
    reported: list[str] = []

    async def run(sockets: ListeningSockets) -> None:
        async with TokenStreams(engine) as streams:
            config = server_config(application(streams))
            server = HTTPServer(config, streams, lambda: reported.append("ready"), exit_now)
            serving = asyncio.create_task(server.serve(sockets.sockets))
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{sockets.port}", timeout=600) as client:
                await body(server, client)
            await serving

    with closing(ListeningSockets(0)) as sockets:
        asyncio.run(run(sockets))
    return reported


def never(status: int) -> None:
    raise AssertionError("the server exited at once")


@pytest.fixture(autouse=True)
def _allow_slow_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the shutdown time limit, because shutdown can be slow on a busy machine."""
    monkeypatch.setattr(http_server, "STOP_SECONDS", 600)


def long_engine() -> Engine[HashTicket]:
    engine, _ = hash_engine(num_blocks=4096, context=1 << 15)
    return engine


def test_stopping_ends_every_stream_with_a_last_event() -> None:
    ends: list[str] = []

    async def body(server: http_server.HTTPServer, client: httpx.AsyncClient) -> None:
        begun: list[None] = []

        async def read() -> None:
            async with client.stream("GET", "/reply") as response:
                last = ""
                async for line in response.aiter_lines():
                    if not last:
                        begun.append(None)
                        server.should_exit = len(begun) == 3
                    last = line
                ends.append(last)

        await asyncio.gather(read(), read(), read())

    engine = long_engine()
    assert serve_while(engine, body, never) == ["ready"]
    assert ends == ["abort"] * 3
    engine.assert_empty()


def test_stopping_server_refuses_new_connections() -> None:
    async def body(server: http_server.HTTPServer, client: httpx.AsyncClient) -> None:
        assert (await client.get("/submit")).text == "submitted"
        async with client.stream("GET", "/reply") as response:
            await anext(lines := response.aiter_lines())
            server.should_exit = True
            async for _ in lines:
                pass
        with pytest.raises(httpx.ConnectError):
            await client.get("/submit")

    serve_while(long_engine(), body, never)


class StuckRunner(HashRunner):
    """A runner whose second step blocks until the test releases it."""

    def __init__(self) -> None:
        super().__init__(EngineConfig("hash", 1 << 20, 64), random.Random(0))
        self.free = threading.Event()
        self.steps = 0

    def collect(self, ticket: HashTicket) -> Any:
        self.steps += 1
        if self.steps > 1:
            assert self.free.wait(60)
        return super().collect(ticket)


def test_event_loop_and_garbage_collector_do_not_delay_the_engine() -> None:
    interval = sys.getswitchinterval()
    loaded: list[list[int]] = [[] for _ in range(1000)]
    try:
        host.tune_interpreter()
        assert sys.getswitchinterval() < 0.001
        looked_through = {id(found) for found in gc.get_objects()}
        assert not any(id(one) in looked_through for one in loaded)
    finally:
        sys.setswitchinterval(interval)


def test_stuck_engine_does_not_delay_the_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "STOP_SECONDS", 0.2)
    runner = StuckRunner()
    engine = Engine(EngineConfig("hash", 1 << 20, 64, max_step_tokens=64, max_running=8), VOCABULARY, runner)
    abandoned: list[tuple[int, bool]] = []

    def exit_now(status: int) -> None:
        abandoned.append((status, runner.free.is_set()))
        runner.free.set()

    async def body(server: http_server.HTTPServer, client: httpx.AsyncClient) -> None:
        async with client.stream("GET", "/reply") as response:
            await anext(lines := response.aiter_lines())
            server.should_exit = True
            async for _ in lines:
                pass

    serve_while(engine, body, exit_now)
    assert abandoned == [(0, False)]


def test_server_ends_after_its_engine_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process exits with a failure, so that a supervisor starts it again. Clients get the reason first."""
    monkeypatch.setattr(http_server, "FAILURE_SECONDS", 0.05)
    engine, runner = hash_engine(num_blocks=4096, context=1 << 15)
    ends: list[str] = []

    def lost(ticket: HashTicket) -> Any:
        raise DeviceLost("The GPU has stopped working")

    async def run(sockets: ListeningSockets) -> None:
        async with TokenStreams(engine) as streams:
            server = HTTPServer(server_config(application(streams)), streams, lambda: None, never)
            serving = asyncio.create_task(server.serve_until_failure(sockets.sockets))
            url = f"http://127.0.0.1:{sockets.port}/reply"
            async with httpx.AsyncClient(timeout=600) as client, client.stream("GET", url) as response:
                await anext(lines := response.aiter_lines())
                runner.collect = lost  # type: ignore[method-assign]
                ends.extend([line async for line in lines][-1:])
            await serving

    with closing(ListeningSockets(0)) as sockets, pytest.raises(EngineError, match="The GPU has stopped working"):
        asyncio.run(run(sockets))
    assert ends == ["error"]


class Keyboard(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_engine_of_a_chat_is_not_announced(capsys: pytest.CaptureFixture[str]) -> None:
    instance = Instance(1, 4645, "http://127.0.0.1:4645", "./hash.gguf", "/nowhere/hash.gguf", "now", "chat")
    host._announce("hash", instance, load_settings(), LineProgress())
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("stdin", [Keyboard(), io.StringIO(), None])
def test_ctrl_c_is_mentioned_only_in_a_terminal(
    stdin: io.StringIO | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", stdin)
    instance = Instance(1, 4645, "http://127.0.0.1:4645", "./hash.gguf", "/nowhere/hash.gguf", "now")
    host._announce("hash", instance, load_settings(), LineProgress())
    said = capsys.readouterr().err
    assert "hash is ready at http://127.0.0.1:4645/v1" in said
    assert ("Ctrl-C stops it" in said) == isinstance(stdin, Keyboard)


@pytest.mark.parametrize(
    ("sent", "abandoned"),
    [
        ("SIGINT", []),
        ("SIGTERM SIGTERM", []),
        ("SIGTERM SIGHUP SIGTERM", []),
        ("SIGINT SIGTERM", []),
        ("SIGTERM SIGINT", [130]),
        ("SIGHUP SIGINT SIGINT", [130, 130]),
    ],
)
def test_only_a_second_ctrl_c_exits_at_once(sent: str, abandoned: list[int]) -> None:
    """SIGTERM never exits at once, because two programs may send it at the same time."""
    reported: list[int] = []

    async def main() -> None:
        async with TokenStreams(long_engine()) as streams:
            server = HTTPServer(server_config(application(streams)), streams, lambda: None, reported.append)
            for name in sent.split():
                server._on_signal(signal.Signals[name], None)
            assert server.should_exit

    asyncio.run(main())
    assert reported == abandoned


def test_sighup_stops_the_server_unless_it_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    handled: list[signal.Signals] = []

    async def main() -> None:
        async with TokenStreams(long_engine()) as streams:
            server = HTTPServer(server_config(application(streams)), streams, lambda: None, never)
            with monkeypatch.context() as patch:
                patch.setattr(signal, "signal", lambda number, handler: handled.append(number))
                patch.setattr(signal, "getsignal", lambda number: current)
                server.stop_on_signals()

    for current in (signal.SIG_DFL, signal.SIG_IGN):
        handled.clear()
        asyncio.run(main())
        assert (signal.SIGHUP in handled) == (current is signal.SIG_DFL)


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "192.0.2.1", "box.example"])  # noqa: S104
def test_public_address_needs_a_key(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGLE_STATE_DIR", str(tmp_path))
    settings = replace(load_settings(), host=address)
    with pytest.raises(InvalidSetting, match="accepts other machines, and no API key is set"):
        host.access_policy(settings)
    host.access_policy(replace(settings, api_key=("k" * 20,)))
