"""The port for other machines: TLS beside the plain port, its certificate, and its keys."""

import asyncio
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from app.client.pinned_tls import pinned_context
from app.errors import InvalidSetting
from app.process.listening import EVERY_ADDRESS, ListeningSockets
from app.server import host, http_server
from app.server.http_server import HTTPServer, TLSListener, server_config
from app.settings.settings import Settings, load_settings
from tests.app.server.shared_machine import SharedMachine, share


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> SharedMachine:
    return share(tmp_path_factory.mktemp("box"))


class Idle:
    failure = ""

    async def stop(self) -> None:
        """Do nothing."""


def serve_while(shared: SharedMachine, body: Callable[[int, int], Awaitable[None]]) -> None:
    """Serve on a plain port and on one with TLS while `body` runs with both."""

    async def slow(request: Request) -> Response:
        await asyncio.sleep(0.5)
        return PlainTextResponse("slow")

    async def path(request: Request) -> Response:
        return PlainTextResponse(request.url.scheme)

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(shared.certificate, shared.private_key)

    async def run(plain: ListeningSockets, tls: ListeningSockets) -> None:
        ready = asyncio.Event()
        listener = TLSListener(tls.sockets, context)
        server = HTTPServer(
            server_config(Starlette(routes=[Route("/", path), Route("/slow", slow)])),
            Idle(),
            ready.set,
            lambda status: None,
            tls=listener,
        )
        serving = asyncio.create_task(server.serve(plain.sockets))
        await ready.wait()
        await body(plain.port, tls.port)
        server.stop()
        await serving

    with closing(ListeningSockets(0)) as plain, closing(ListeningSockets(0)) as tls:
        asyncio.run(run(plain, tls))


def test_plain_port_and_tls_port_are_served(shared: SharedMachine) -> None:
    box = shared.box(1)

    async def body(plain: int, tls: int) -> None:
        async with httpx.AsyncClient(verify=pinned_context(box.fingerprint), trust_env=False) as client:
            assert (await client.get(f"http://127.0.0.1:{plain}/")).text == "http"
            assert (await client.get(f"https://127.0.0.1:{tls}/")).text == "https"
            with pytest.raises(httpx.HTTPError):
                await client.get(f"http://127.0.0.1:{tls}/")

    serve_while(shared, body)


def test_client_that_ends_tls_has_disconnected(shared: SharedMachine, caplog: pytest.LogCaptureFixture) -> None:
    """A client of plain HTTP may close its half and still read the reply."""

    async def body(plain: int, tls: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", tls, ssl=pinned_context(shared.box(1).fingerprint))
        writer.write(b"GET /slow HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.close()
        await writer.wait_closed()

    serve_while(shared, body)
    assert "eof_received" not in caplog.text


def test_silent_client_loses_its_connection(shared: SharedMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_HANDSHAKE_SECONDS", 0.3)

    async def body(plain: int, tls: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", tls)
        started = time.monotonic()
        assert await asyncio.wait_for(reader.read(), 10) == b""
        assert time.monotonic() - started >= 0.2
        writer.close()

    serve_while(shared, body)


def test_blocking_sockets_cannot_skip_the_check_of_the_certificate() -> None:
    with socket.socket() as plain, pytest.raises(NotImplementedError):
        pinned_context("0" * 64).wrap_socket(plain)


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return load_settings(state_dir=tmp_path / "box" / "state", tls_port=1)


def test_port_for_other_machines_needs_a_key_and_a_certificate(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="no API key is set") as refused:
        host.access_policy(settings)
    assert refused.value.remedy == "ingle share"
    host.access_policy(replace(settings, api_key=("k" * 20,)))
    with (
        pytest.raises(InvalidSetting, match=r"certificate\.pem: No such file") as refused,
        host._listen_by_tls(settings),
    ):
        pass
    assert refused.value.remedy == "ingle share"
    share(tmp_path / "box")
    host.access_policy(settings)


def test_port_for_other_machines_is_on_all_addresses_by_default(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share(tmp_path / "box")
    asked: list[tuple[int, str]] = []

    class Recorded(ListeningSockets):
        def __init__(self, port: int, host: str = "127.0.0.1", *, option: str = "--port") -> None:
            asked.append((port, host))
            super().__init__(0, "127.0.0.1", option=option)

    monkeypatch.setattr(host, "ListeningSockets", Recorded)
    with host._listen_by_tls(settings):
        pass
    with host._listen_by_tls(load_settings(host="localhost", state_dir=settings.state_dir, tls_port=2)):
        pass
    assert asked == [(1, EVERY_ADDRESS), (2, "localhost")]


def test_damaged_certificate_is_an_invalid_setting(settings: Settings, tmp_path: Path) -> None:
    shared = share(tmp_path / "box")
    shared.certificate.write_bytes(b"nothing")
    with pytest.raises(InvalidSetting, match=r"certificate\.pem: "), host._listen_by_tls(settings):
        pass
