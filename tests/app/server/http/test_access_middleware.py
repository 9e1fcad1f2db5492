"""The access middleware refuses requests whose Host is not this server, and web pages of other sites, on every path."""

import asyncio
import http.client
import itertools
from typing import NoReturn

import pytest
from starlette.types import Message

from app.server.dialects.openai.errors import ERRORS as OPENAI_ERRORS
from app.server.http.access import Authenticator, RequestLimits
from app.server.http.access_middleware import AccessMiddleware
from app.server.http.errors import ErrorFormats
from tests.app.server.http.test_access import METHODS as ALL_METHODS
from tests.app.server.http.test_access import paths
from tests.app.server.live_server import LiveServer

PATHS = ["/health", "/metrics", "/v1/models", "/v1/chat/completions", "/no/such/path", "/"]
METHODS = ["GET", "POST", "OPTIONS", "DELETE"]

FOREIGN_HOSTS = [
    *("evil.com", "localhost.evil.com", "127.0.0.1.evil.com", "localhost.", "0.0.0.0", "192.168.1.7", "127.0.0.2"),  # noqa: S104
    *("::1", "[::]", "[::ffff:127.0.0.1]", "[::1", "2130706433", "0x7f000001", "127.1", ""),
    *("localhost/?x", "localhost@evil.com", "evil.com@localhost", "localhost evil.com", "localhost#", "localhost:"),
    *("localhost:80", "127.0.0.1:1", "localhost:PORT:PORT", "localhost:0PORT", "localhost:+PORT", "evil.com:PORT"),
    *("other.test", "ingle.test.evil.com", ":PORT", "localhost,evil.com"),
]
OWN_HOSTS = ["localhost", "127.0.0.1", "[::1]", "LocalHost", "ingle.test"]


def status(server: LiveServer, method: str, path: str, headers: list[tuple[str, str]]) -> tuple[int, list[str]]:
    """Send a request with exactly these headers. Returns the status, and the names of the response's headers."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    try:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in headers:
            connection.putheader(name, value.replace("PORT", str(server.port)))
        connection.endheaders()
        response = connection.getresponse()
        response.read()
        return response.status, [name.lower() for name, _ in response.getheaders()]
    finally:
        connection.close()


@pytest.mark.parametrize("host", FOREIGN_HOSTS)
def test_foreign_host_is_refused_on_every_path(hash_server: LiveServer, host: str) -> None:
    for path, method in itertools.product(PATHS, METHODS):
        # The HTTP parser may refuse a malformed Host header before the middleware checks it.
        assert status(hash_server, method, path, [("Host", host)])[0] in (400, 403), (method, path)


def test_foreign_hosts_are_refused_by_the_middleware_not_the_parser(hash_server: LiveServer) -> None:
    assert status(hash_server, "GET", "/health", [("Host", "evil.com")])[0] == 403


NOT_ONE_HOST = [[], ["localhost", "evil.com"], ["evil.com", "localhost"], ["localhost"] * 2]


@pytest.mark.parametrize("hosts", NOT_ONE_HOST)
def test_server_requires_exactly_one_host(hash_server: LiveServer, hosts: list[str]) -> None:
    assert status(hash_server, "GET", "/health", [("Host", host) for host in hosts])[0] in (400, 403)


@pytest.mark.parametrize("hosts", NOT_ONE_HOST)
def test_middleware_requires_exactly_one_host_without_a_parser(hosts: list[str]) -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"host", host.encode()) for host in hosts]
    scope = {"type": "http", "method": "GET", "path": "/", "headers": headers, "server": ("127.0.0.1", 80)}
    guarded = AccessMiddleware(never, authenticator=Authenticator(), limits=RequestLimits(0), names=["localhost"])
    door = ErrorFormats(guarded, [], OPENAI_ERRORS)
    asyncio.run(door(scope, never, send))
    assert sent[0]["status"] == 403


@pytest.mark.parametrize("host", OWN_HOSTS)
def test_names_of_the_server_are_accepted_with_and_without_the_port(hash_server: LiveServer, host: str) -> None:
    for suffix in ("", ":PORT"):
        assert status(hash_server, "GET", "/health", [("Host", host + suffix)])[0] == 200


@pytest.mark.parametrize(
    "origin",
    [
        *("null", "http://evil.com", "https://localhost.evil.com", "http://localhost", "http://localhost:3000", ""),
        *("http://127.0.0.1:PORT", "file://", "chrome-extension://abc", "http://evil.com, http://localhost:PORT"),
        *("http://localhost:PORT.evil.com", "http://localhost:PORT/", "localhost:PORT", "ftp://localhost:PORT"),
    ],
)
def test_pages_of_other_origins_are_refused_on_every_path(hash_server: LiveServer, origin: str) -> None:
    for path, method in itertools.product(PATHS, METHODS):
        headers = [("Host", "localhost:PORT"), ("Origin", origin)]
        code, sent = status(hash_server, method, path, headers)
        assert code == 403, (method, path)
        assert not [name for name in sent if name.startswith("access-control")]


def test_pages_of_the_same_origin_are_accepted(hash_server: LiveServer) -> None:
    headers = [("Host", "localhost:PORT"), ("Origin", "http://localhost:PORT"), ("Sec-Fetch-Site", "same-origin")]
    code, sent = status(hash_server, "GET", "/v1/models", headers)
    assert code == 200
    assert not [name for name in sent if name.startswith("access-control")]


@pytest.mark.parametrize(
    ("site", "code"),
    [("cross-site", 403), ("same-site", 403), ("Cross-Site", 403), ("none", 200), ("same-origin", 200)],
)
def test_sec_fetch_site_decides_whether_a_page_is_refused(hash_server: LiveServer, site: str, code: int) -> None:
    for path in ("/health", "/v1/models"):
        assert status(hash_server, "GET", path, [("Host", "localhost"), ("Sec-Fetch-Site", site)])[0] == code


def test_preflight_from_an_unknown_origin_is_refused(hash_server: LiveServer) -> None:
    headers = [
        ("Host", "localhost:PORT"),
        ("Origin", "http://evil.com"),
        ("Access-Control-Request-Method", "POST"),
        ("Access-Control-Request-Headers", "content-type"),
    ]
    code, sent = status(hash_server, "OPTIONS", "/v1/chat/completions", headers)
    assert code == 403
    assert not [name for name in sent if name.startswith("access-control")]


def test_every_route_and_method_refuses_foreign_hosts_and_pages(hash_server: LiveServer) -> None:
    """Calls the application directly, so that no HTTP parser can refuse the request first."""
    port = str(hash_server.port)
    foreign = [[("host", host.replace("PORT", port))] for host in FOREIGN_HOSTS]
    foreign += [[("host", "localhost"), ("origin", origin)] for origin in ("null", "http://evil.com", "")]

    async def refused() -> int:
        count = 0
        for path, method, given in itertools.product(paths(hash_server), ALL_METHODS, foreign):
            sent: list[Message] = []

            async def send(message: Message, sent: list[Message] = sent) -> None:
                sent.append(message)

            headers = [(name.encode(), value.encode()) for name, value in given]
            address = ("127.0.0.1", hash_server.port)
            scope = {"type": "http", "method": method, "path": path, "headers": headers, "server": address}
            await hash_server.application(scope, never, send)
            assert sent[0]["status"] == 403, (path, method, given)
            count += 1
        return count

    assert hash_server.call(refused()) > 2000


async def never(*_: object) -> NoReturn:
    raise AssertionError("the middleware accepted the request")
