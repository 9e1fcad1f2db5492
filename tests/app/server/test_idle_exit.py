"""An idle server ends after its idle time. Requests, running work, and unread connections keep it running."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import closing
from types import SimpleNamespace

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from app.errors import InvalidSetting
from app.process.listening import ListeningSockets
from app.server.http_server import HTTPServer, IdleExit, server_config
from app.settings.settings import load_settings
from tests.app.server.live_server import Clock

IDLE_SECONDS = 0.4


class NoWork:
    """Work that never fails, and ends at once."""

    failure = ""

    async def stop(self) -> None:
        """Do nothing."""


def serve_until_idle(
    body: Callable[[HTTPServer, httpx.AsyncClient, asyncio.Event], Awaitable[None]],
    is_busy: Callable[[], bool] = lambda: False,
) -> None:
    """Run `body` beside a server, and return when the server has ended. /held answers when the event is set."""

    async def run(sockets: ListeningSockets) -> None:
        release = asyncio.Event()

        async def held(request: Request) -> Response:
            await release.wait()
            return PlainTextResponse("released")

        async def answer(request: Request) -> Response:
            return PlainTextResponse("ok")

        application = Starlette(routes=[Route("/held", held), Route("/", answer)])
        idle = IdleExit(IDLE_SECONDS, is_busy)
        server = HTTPServer(server_config(application), NoWork(), lambda: None, never, idle)
        serving = asyncio.create_task(server.serve_until_failure(sockets.sockets))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{sockets.port}", timeout=60) as client:
            await body(server, client, release)
        await serving

    with closing(ListeningSockets(0)) as sockets:
        asyncio.run(run(sockets))


def never(status: int) -> None:
    raise AssertionError("the server exited at once")


def test_server_without_requests_ends() -> None:
    async def body(server: HTTPServer, client: httpx.AsyncClient, release: asyncio.Event) -> None:
        """Send nothing."""

    serve_until_idle(body)


def test_running_request_keeps_the_server_running() -> None:
    async def body(server: HTTPServer, client: httpx.AsyncClient, release: asyncio.Event) -> None:
        held = asyncio.create_task(client.get("/held"))
        await asyncio.sleep(3 * IDLE_SECONDS)
        assert (await client.get("/")).text == "ok"  # on a new connection
        release.set()
        assert (await held).text == "released"

    serve_until_idle(body)


def test_each_request_restarts_the_idle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, idle_polls = Clock(), 0
    monkeypatch.setattr("app.server.http_server.time", SimpleNamespace(monotonic=clock))

    def is_busy() -> bool:
        """Count the polls that find no request since the last poll."""
        nonlocal idle_polls
        idle_polls += 1
        return False

    async def body(server: HTTPServer, client: httpx.AsyncClient, release: asyncio.Event) -> None:
        for _ in range(12):
            assert (await client.get("/", headers={"connection": "close"})).text == "ok"
            before = idle_polls
            while idle_polls == before:
                assert not server.should_exit
                await asyncio.sleep(0.01)
            clock.seconds += 0.75 * IDLE_SECONDS
        assert not server.should_exit
        clock.seconds += IDLE_SECONDS

    serve_until_idle(body, is_busy)


def test_work_without_a_request_keeps_the_server_running() -> None:
    busy = [True]

    async def body(server: HTTPServer, client: httpx.AsyncClient, release: asyncio.Event) -> None:
        await asyncio.sleep(3 * IDLE_SECONDS)
        assert not server.should_exit
        assert (await client.get("/")).text == "ok"
        busy.clear()

    serve_until_idle(body, lambda: bool(busy))


def test_connection_accepted_before_the_end_is_served() -> None:
    """A client that has connected, and sends its request when the server has stopped to listen, gets a reply."""

    async def body(server: HTTPServer, client: httpx.AsyncClient, release: asyncio.Event) -> None:
        port = client.base_url.port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
            except ConnectionRefusedError:
                break
            await asyncio.sleep(0.02)
        await asyncio.sleep(IDLE_SECONDS)
        assert not server.should_exit
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()

    serve_until_idle(body)


@pytest.mark.parametrize(("value", "seconds"), [("30m", 1800), ("0", 0), ("auto", None), (90, 90), (1.5, 1.5)])
def test_idle_time_is_a_duration(value: object, seconds: float | None) -> None:
    assert load_settings(idle_exit=value).idle_exit == seconds


def test_wrong_idle_time_names_the_forms() -> None:
    with pytest.raises(InvalidSetting, match="must be auto, or a duration like 90s, 30m, or 2h, not 'soon'"):
        load_settings(idle_exit="soon")
