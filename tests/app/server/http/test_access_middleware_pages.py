"""Web pages that the user let in: they are told so, for their exact origin; all others are told nothing."""

from collections.abc import Iterator

import pytest

from app.generation.template import ChatTemplateRenderer
from app.server.application import AccessPolicy
from app.server.http.access import Authenticator
from app.text.tokenizer import Tokenizer
from tests.app.server.http.test_access import ask
from tests.app.server.live_server import LiveServer, controlled_engine

APP = "https://app.example:8443"
KEY = "sk-of-the-page"
PREFLIGHT = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": "authorization,content-type"}


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> Iterator[LiveServer]:
    engine, _ = controlled_engine(tokenizer.vocab_size)
    policy = AccessPolicy(Authenticator([KEY]), allowed_origins=[APP, "http://localhost:3000"])
    with LiveServer("hash", engine, tokenizer, renderer, policy=policy) as server:
        yield server


def cors(headers: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.startswith("access-control-")}


def test_a_preflight_needs_no_key_and_says_what_may_be_sent(server: LiveServer) -> None:
    for path in ("/v1/chat/completions", "/none"):
        status, body, headers = ask(server, "OPTIONS", path, Origin=APP, Sec_Fetch_Site="cross-site", **PREFLIGHT)
        assert (status, body) == (204, b"")
        assert headers["vary"] == "Origin, Access-Control-Request-Headers"
        assert cors(headers) == {
            "access-control-allow-origin": APP,
            "access-control-allow-methods": "GET, POST, DELETE",
            "access-control-allow-headers": "authorization,content-type",
            "access-control-max-age": "600",
        }


@pytest.mark.parametrize(
    ("asked", "allowed"),
    [
        ("x-stainless-lang, openai-beta", "x-stainless-lang, openai-beta"),
        (
            "anthropic-dangerous-direct-browser-access,anthropic-version",
            "anthropic-dangerous-direct-browser-access,anthropic-version",
        ),
        ("", "Authorization, Content-Type, X-API-Key, X-Ingle-Class"),
        ("a b", "Authorization, Content-Type, X-API-Key, X-Ingle-Class"),
        ("a,", "Authorization, Content-Type, X-API-Key, X-Ingle-Class"),
    ],
)
def test_the_headers_that_sdks_ask_for_are_allowed(server: LiveServer, asked: str, allowed: str) -> None:
    preflight = {**PREFLIGHT, "Access_Control_Request_Headers": asked}
    headers = ask(server, "OPTIONS", "/v1/chat/completions", Origin=APP, **preflight)[2]
    assert headers["access-control-allow-headers"] == allowed


def test_a_page_of_the_web_may_ask_for_this_network(server: LiveServer) -> None:
    asked = {**PREFLIGHT, "Access_Control_Request_Private_Network": "true"}
    headers = ask(server, "OPTIONS", "/v1/models", Origin=APP, **asked)[2]
    assert headers["access-control-allow-private-network"] == "true"


@pytest.mark.parametrize("authorized", [True, False])
def test_a_page_that_is_let_in_reads_what_it_is_told(server: LiveServer, authorized: bool) -> None:
    key = {"Authorization": f"Bearer {KEY}"} if authorized else {}
    status, _, headers = ask(server, "GET", "/v1/models", Origin=APP, Sec_Fetch_Site="cross-site", **key)
    assert status == (200 if authorized else 401)
    assert cors(headers) == {"access-control-allow-origin": APP, "access-control-expose-headers": "Retry-After"}
    assert headers["vary"] == "Origin"


@pytest.mark.parametrize(
    "origin",
    ["null", "https://app.example", f"{APP}.evil.com", f"{APP}/", f"{APP} {APP}", "http://app.example:8443", "*", ""],
)
def test_no_other_page_is_let_in_or_told_anything(server: LiveServer, origin: str) -> None:
    for method, more in (("OPTIONS", PREFLIGHT), ("GET", {}), ("POST", {"Content_Type": "text/plain"})):
        status, _, headers = ask(server, method, "/v1/models", Origin=origin, x_api_key=KEY, **more)
        assert (status, cors(headers)) == (403, {})


def test_a_page_that_does_not_say_its_origin_is_none_of_them(server: LiveServer) -> None:
    status, _, headers = ask(server, "GET", "/v1/models", Sec_Fetch_Site="cross-site", x_api_key=KEY)
    assert (status, cors(headers)) == (403, {})


def test_who_is_no_page_is_told_nothing_of_pages(server: LiveServer) -> None:
    status, _, headers = ask(server, "GET", "/v1/models", x_api_key=KEY)
    assert (status, cors(headers)) == (200, {})
