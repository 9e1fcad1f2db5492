"""Authentication: when a key is required, which headers carry it, and that every path checks it."""

import errno
import hashlib
import hmac
import http.client
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import httpx
import pytest
from starlette.routing import Route

from app.generation.template import ChatTemplateRenderer
from app.server.application import AccessPolicy, create_application
from app.server.http.access import OTHER_MACHINE, THIS_USER, Authenticator, Peer, is_public
from app.server.http.endpoint import Endpoint
from app.server.http.errors import InvalidRequest
from app.text.tokenizer import Tokenizer
from tests.app.server.live_server import LiveServer, controlled_engine

KEYS = ("sk-first", "sk-second!~")
OWN = "of-our-commands"
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")

ENDLESS = "/models/sse"  # path of a stream without an end


@pytest.fixture(scope="module")
def locked(tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> Iterator[LiveServer]:
    engine, _ = controlled_engine(tokenizer.vocab_size)
    with LiveServer("hash", engine, tokenizer, renderer, policy=AccessPolicy(Authenticator(KEYS, OWN))) as server:
        yield server
    engine.assert_empty()


Answer = tuple[int, bytes, dict[str, str]]


def ask(server: LiveServer, method: str, path: str, **headers: str) -> Answer:
    return ask_all(server, [method], path, **headers)[0]


def ask_all(server: LiveServer, methods: Sequence[str], path: str, **headers: str) -> list[Answer]:
    """Send a request per method on one connection and return the replies. Reconnects if the server closes the
    connection.
    """
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    answers = []
    with closing(http.client.HTTPConnection("127.0.0.1", server.port)) as connection:
        for method in methods:
            connection.request(method, path, headers=sent)
            response = connection.getresponse()
            reported = {name.lower(): value for name, value in response.getheaders()}
            answers.append((response.status, response.read(), reported))
    return answers


def paths(server: LiveServer) -> list[str]:
    """Return every path of the application, and one that does not exist."""
    routes = create_application(server.models).routes
    assert all(isinstance(route, Route) for route in routes)
    names = (route.path for route in routes if isinstance(route, Route))
    return [*(name.replace("{model:path}", "hash").replace("{file}", "page.js") for name in names), "/none"]


@pytest.mark.share(3)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer sk-firs"},
        {"Authorization": "Bearer sk-first2"},
        {"Authorization": "Bearer SK-FIRST"},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer "},
        {"Authorization": "sk-first"},
        {"Authorization": "Basic sk-first"},
        {"Authorization": "Bearer sk-first sk-second!~"},
        {"x_api_key": "wrong"},
        {"x_api_key": "Bearer sk-first"},
        {"x_api_key": ""},
        {"Cookie": "key=sk-first"},
        {"X_API_Key_": "sk-first"},
    ],
)
def test_only_public_routes_answer_without_a_key(locked: LiveServer, headers: dict[str, str]) -> None:
    routes = create_application(locked.models).routes
    shaped = {route.path for route in routes if isinstance(route, Endpoint) and route.errors is not None}
    for path in paths(locked):
        for method, (status, body, answer) in zip(METHODS, ask_all(locked, METHODS, path, **headers), strict=True):
            if is_public(method, path):
                assert status == 200
                continue
            assert (status, answer["www-authenticate"]) == (401, "Bearer"), (method, path)
            if method != "HEAD":
                error = json.loads(body)["error"]
                reported = error if isinstance(error, str) else error["message"]
                assert reported.startswith("The API key is missing or unknown")
                if path not in shaped:
                    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")


def test_key_in_the_path_is_not_accepted(locked: LiveServer) -> None:
    for path in ("/v1/models?key=sk-first", "/v1/models?api_key=sk-first", "//health", "/health/", "/%68ealth/x"):
        assert ask(locked, "GET", path)[0] == 401


@pytest.mark.parametrize("key", [*KEYS, OWN])
@pytest.mark.parametrize("header", ["Authorization", "x_api_key"])
def test_each_key_works_in_both_headers(locked: LiveServer, key: str, header: str) -> None:
    value = f"Bearer {key}" if header == "Authorization" else key
    for path in paths(locked):
        methods = ("POST", "DELETE") if path == ENDLESS else ("GET", "POST", "DELETE")
        for status, _, _ in ask_all(locked, methods, path, **{header: value}):
            assert status not in (401, 403)
    assert ask(locked, "GET", "/v1/models", **{header: value.replace("Bearer", "bearer ")})[0] == 200


def test_health_without_a_key_reports_only_the_status(locked: LiveServer) -> None:
    assert json.loads(ask(locked, "GET", "/health")[1]) == {"status": "ok"}
    assert "kv_blocks" in json.loads(ask(locked, "GET", "/health", x_api_key=OWN)[1])


def test_programs_of_this_user_need_no_key_by_default(hash_server: LiveServer) -> None:
    for headers in ({}, {"Authorization": "Bearer none"}, {"x_api_key": "anything"}):
        assert ask(hash_server, "GET", "/v1/models", **headers)[0] == 200


def test_programs_of_another_user_need_the_own_key(
    tokenizer: Tokenizer, renderer: ChatTemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = controlled_engine(tokenizer.vocab_size)
    with LiveServer("hash", engine, tokenizer, renderer, policy=AccessPolicy(Authenticator(own_key=OWN))) as server:
        assert ask(server, "GET", "/v1/models")[0] == 200
        another = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: another)
        for path in paths(server):
            statuses = [status for status, _, _ in ask_all(server, METHODS, path)]
            assert statuses == [200 if is_public(method, path) else 401 for method in METHODS]
        assert ask(server, "GET", "/v1/models", x_api_key=OWN)[0] == 200


def test_running_out_of_file_descriptors_returns_503(hash_server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(peer: Peer) -> bool:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Peer, "is_this_user", fail)
    status, body, headers = ask(hash_server, "GET", "/v1/models")
    assert (status, headers["retry-after"]) == (503, "1")
    assert json.loads(body)["error"]["type"] == "server_error"


def test_connection_without_a_known_owner_needs_a_key() -> None:
    scope: dict[str, Any] = {"type": "http", "method": "GET", "path": "/metrics", "headers": [], "state": {}}
    with pytest.raises(InvalidRequest) as refused:
        Authenticator().authenticate(scope)
    assert refused.value.status == 401
    scope["headers"] = [(b"x-api-key", OWN.encode())]
    assert Authenticator(own_key=OWN).authenticate(scope) == THIS_USER


@pytest.mark.parametrize(
    ("sent", "caller"), [(KEYS[0], "key 1"), (OWN, THIS_USER.name), ("shared", OTHER_MACHINE.name)]
)
def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch, sent: str, caller: str) -> None:
    compared = []

    def compare(expected: bytes, digest: bytes) -> bool:
        compared.append(expected)
        return expected == digest

    monkeypatch.setattr(hmac, "compare_digest", compare)
    scope = {"type": "http", "method": "GET", "path": "/metrics", "headers": [(b"x-api-key", sent.encode())]}
    assert Authenticator(KEYS, OWN, lambda: "shared").authenticate(scope).name == caller
    keys = (*KEYS, OWN, *(["shared"] * (sent == "shared")))
    assert compared == [hashlib.sha256(key.encode()).digest() for key in keys]


def test_keys_have_separate_caches_and_the_first_keeps_the_old_cache() -> None:
    def salt(key: str, *keys: str) -> str:
        scope = {"type": "http", "method": "GET", "path": "/", "headers": [(b"x-api-key", key.encode())]}
        return Authenticator(keys, OWN).authenticate(scope).cache_salt

    assert salt("a", "a") == salt("a", "a", "b") == salt(OWN, "a") == ""
    assert salt("b", "a", "b") == salt("b", "c", "d", "b") != salt("c", "a", "b", "c") != ""
    assert "b" * 8 not in salt("b" * 8, "a", "b" * 8)


def test_cached_prompts_of_another_key_are_not_reported(locked: LiveServer) -> None:
    def cached(key: str) -> int:
        body = {"model": "hash", "prompt": list(range(1000, 1100)), "max_tokens": 1}
        reply = httpx.post(f"{locked.url}/v1/completions", json=body, headers={"x-api-key": key}, timeout=60).json()
        tokens: int = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        return tokens

    assert [cached(KEYS[0]), cached(KEYS[1]), cached(KEYS[0]) > 0, cached(OWN) > 0] == [0, 0, True, True]
