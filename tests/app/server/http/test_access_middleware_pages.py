"""CORS headers: web pages of allowed origins get them for their exact origin, and other pages get none."""

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


def test_preflight_needs_no_key_and_lists_methods_and_headers(server: LiveServer) -> None:
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
def test_headers_requested_by_sdks_are_allowed(server: LiveServer, asked: str, allowed: str) -> None:
    preflight = {**PREFLIGHT, "Access_Control_Request_Headers": asked}
    headers = ask(server, "OPTIONS", "/v1/chat/completions", Origin=APP, **preflight)[2]
    assert headers["access-control-allow-headers"] == allowed


def test_public_page_may_request_private_network_access(server: LiveServer) -> None:
    asked = {**PREFLIGHT, "Access_Control_Request_Private_Network": "true"}
    headers = ask(server, "OPTIONS", "/v1/models", Origin=APP, **asked)[2]
    assert headers["access-control-allow-private-network"] == "true"


@pytest.mark.parametrize("authorized", [True, False])
def test_page_of_an_allowed_origin_can_read_replies(server: LiveServer, authorized: bool) -> None:
    key = {"Authorization": f"Bearer {KEY}"} if authorized else {}
    status, _, headers = ask(server, "GET", "/v1/models", Origin=APP, Sec_Fetch_Site="cross-site", **key)
    assert status == (200 if authorized else 401)
    assert cors(headers) == {"access-control-allow-origin": APP, "access-control-expose-headers": "Retry-After"}
    assert headers["vary"] == "Origin"


@pytest.mark.parametrize(
    "origin",
    ["null", "https://app.example", f"{APP}.evil.com", f"{APP}/", f"{APP} {APP}", "http://app.example:8443", "*", ""],
)
def test_pages_of_other_origins_get_no_cors_headers(server: LiveServer, origin: str) -> None:
    for method, more in (("OPTIONS", PREFLIGHT), ("GET", {}), ("POST", {"Content_Type": "text/plain"})):
        status, _, headers = ask(server, method, "/v1/models", Origin=origin, x_api_key=KEY, **more)
        assert (status, cors(headers)) == (403, {})


def test_page_without_an_origin_is_not_allowed(server: LiveServer) -> None:
    status, _, headers = ask(server, "GET", "/v1/models", Sec_Fetch_Site="cross-site", x_api_key=KEY)
    assert (status, cors(headers)) == (403, {})


def test_other_programs_get_no_cors_headers(server: LiveServer) -> None:
    status, _, headers = ask(server, "GET", "/v1/models", x_api_key=KEY)
    assert (status, cors(headers)) == (200, {})
