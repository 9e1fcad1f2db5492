"""Web pages of other origins in a real browser cannot read replies or start work.

Needs Chromium (`apt-get install chromium`): `python -m pytest -m slow tests/app/server/test_browser.py`. The test's own
server sends the pages. In a DNS rebinding attack, the browser loads the page from the attacker's server and sends all
further requests for the same name to the server under test. A proxy in the test simulates this.
"""

import http.client
import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.generation.template import ChatTemplateRenderer
from app.server.application import AccessPolicy
from app.text.tokenizer import Tokenizer
from tests.app.server.live_server import LiveServer, controlled_engine
from tests.support.processes import HANGING_SECONDS

pytestmark = pytest.mark.slow

PAGE = Path(__file__).with_name("attack_page.html")
LEAST_REQUESTS = 12  # minimum number of requests that the page sends
# Turn off the browser's own protection of local addresses, which would stop the requests before the server sees them.
FLAGS = [
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    "--disable-features=LocalNetworkAccessChecks,BlockInsecurePrivateNetworkRequests",
    "--host-resolver-rules=MAP evil.test 127.0.0.1",
]


@dataclass
class Recorder:
    """ASGI middleware that records requests and responses."""

    app: ASGIApp
    seen: list[tuple[str, str, int]] = field(default_factory=list)  # method, path, status
    headers: list[str] = field(default_factory=list)  # names of all response headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def remember(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.seen.append((scope["method"], scope["path"], message["status"]))
                self.headers += [name.decode().lower() for name, _ in message["headers"]]
            await send(message)

        await self.app(scope, receive, remember)


class Attacker(ThreadingHTTPServer):
    """The attacker's server: sends the page, forwards requests for a rebound name, and receives what the page could
    read.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.report: dict[str, Any] = {}
        self.reported = threading.Event()

    def aim(self, port: int, name: str) -> None:
        """Set the port of the server under test, and the host name by which the page calls it."""
        self.target = port
        self.page = PAGE.read_text().replace("PORT", str(port)).replace("HOST", name).encode()


class _Handler(BaseHTTPRequestHandler):
    server: Attacker

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        path = urlsplit(self.path).path
        if path == "/attack":
            self._answer(200, self.server.page, "text/html")
        elif path == "/report":
            self.server.report = json.loads(body)
            self.server.reported.set()
            self._answer(200, b"", "text/plain")
        elif self.path.startswith("http://"):
            self._forward(path, body)
        else:
            self._answer(404, b"", "text/plain")

    do_POST = do_DELETE = do_OPTIONS = do_GET  # noqa: N815

    def _forward(self, path: str, body: bytes) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.target)
        connection.putrequest(self.command, path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            connection.putheader(name, value)
        connection.endheaders(body)
        response = connection.getresponse()
        self._answer(response.status, response.read(), response.headers.get_content_type())
        connection.close()

    def _answer(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@dataclass
class Outcome:
    """The data that a page could read, and the requests and engine steps that it caused."""

    read: dict[str, Any]
    seen: list[tuple[str, str, int]]
    headers: list[str]
    steps: int  # number of engine steps


Attack = Callable[..., Outcome]


@pytest.fixture
def attack(tokenizer: Tokenizer, renderer: ChatTemplateRenderer, tmp_path: Path) -> Attack:
    """Return a function that opens a page of `origin` in the browser. The page calls the server as `name`."""

    def visited(origin: str, name: str, *, allowed: bool = False) -> Outcome:
        engine, runner = controlled_engine(tokenizer.vocab_size)
        with attacker() as page:
            origin = origin.replace("PAGE", str(page.server_port))
            policy = AccessPolicy(allowed_origins=[origin] if allowed else [])
            with LiveServer("hash", engine, tokenizer, renderer, policy=policy) as server:
                recorder = Recorder(server.application)
                server._server.config.loaded_app = recorder
                page.aim(server.port, name)
                read = visit(page, f"{origin.replace('SERVER', str(server.port))}/attack", tmp_path)
        return Outcome(read, recorder.seen, recorder.headers, runner.plans)

    return visited


@contextmanager
def attacker() -> Iterator[Attacker]:
    page = Attacker()
    thread = threading.Thread(target=page.serve_forever, daemon=True)
    thread.start()
    try:
        yield page
    finally:
        page.shutdown()
        page.server_close()
        thread.join(HANGING_SECONDS)


def visit(page: Attacker, url: str, profile: Path) -> dict[str, Any]:
    """Open the page in the browser. Returns what it could read."""
    via = f"'PROXY 127.0.0.1:{page.server_port}'"
    proxy = f"function FindProxyForURL(url, host) {{ return host == 'rebound.test' ? {via} : 'DIRECT' }}"
    command = ["chromium", *FLAGS, f"--user-data-dir={profile}", f"--proxy-pac-url=data:,{quote(proxy)}", url]
    browser = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        assert page.reported.wait(120)
    finally:
        browser.kill()
        browser.wait(HANGING_SECONDS)
    return page.report


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_page_of_another_origin_cannot_read_or_trigger_anything(attack: Attack, name: str) -> None:
    outcome = attack("http://evil.test:PAGE", name)
    assert {"GET", "POST", "OPTIONS"} == {method for method, _, _ in outcome.seen}
    assert len(outcome.seen) >= LEAST_REQUESTS, "the page sent too few requests"
    assert {status for _, _, status in outcome.seen} == {403}
    assert not [header for header in outcome.headers if header.startswith("access-control")]
    for attempt in ("no-cors get", "no-cors post", "no-cors form", "no-cors with cookies"):
        assert outcome.read[attempt] == {"type": "opaque", "status": 0, "text": ""}
    for attempt in ("cors get", "cors text", "cors json", "cors key", "cors delete"):
        assert outcome.read[attempt] == {"type": "error"}
    assert [outcome.read[attempt] for attempt in ("script", "image", "sandboxed")] == ["error"] * 3
    assert outcome.steps == 0


def test_rebound_name_is_refused(attack: Attack) -> None:
    outcome = attack("http://rebound.test:SERVER", "rebound.test")
    assert len(outcome.seen) >= LEAST_REQUESTS, "the page sent too few requests"
    assert {status for _, _, status in outcome.seen} == {403}
    for attempt in ("cors get", "cors text", "cors json", "cors key", "cors delete"):
        assert (outcome.read[attempt]["type"], outcome.read[attempt]["status"]) == ("basic", 403)
        assert "does not name this server" in outcome.read[attempt]["text"]
    assert outcome.steps == 0


def test_page_of_an_allowed_origin_can_use_the_server(attack: Attack) -> None:
    outcome = attack("http://evil.test:PAGE", "127.0.0.1", allowed=True)
    assert [outcome.read[attempt]["status"] for attempt in ("cors get", "cors json", "cors key")] == [200] * 3
    assert outcome.read["cors text"]["status"] == 415
    assert outcome.steps > 0
