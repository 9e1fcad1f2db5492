"""Requests with a nonce: which of them the server reports, and what it knows about them."""

import json
import secrets
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from app.generation.template import ChatTemplateRenderer
from app.server.application import AccessPolicy
from app.server.http.access import Authenticator
from app.server.http.seen import MAX_RECORDS
from app.text.tokenizer import Tokenizer
from tests.app.server.live_server import LiveServer, controlled_engine
from tests.support.processes import until

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
def http(hash_server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=hash_server.url, trust_env=False, timeout=60) as http:
        yield http


@pytest.fixture
def nonce() -> str:
    return f"ingle-probe-{secrets.token_hex(16)}"


def chat(nonce: str, **fields: Any) -> Mapping[str, Any]:
    return {"model": "hash", "messages": [{"role": "user", "content": f"Say {nonce}"}], "max_tokens": 4, **fields}


def seen(http: httpx.Client, nonce: str) -> list[dict[str, Any]]:
    answer = http.get("/inglenook/seen", params={"nonce": nonce})
    assert answer.status_code == 200, answer.text
    requests: list[dict[str, Any]] = answer.json()["requests"]
    return requests


@pytest.mark.parametrize("streams", [False, True])
def test_request_with_a_nonce_is_reported_with_its_counts(http: httpx.Client, nonce: str, streams: bool) -> None:
    for _ in range(2):
        http.post("/v1/chat/completions", json=chat(nonce, stream=streams, tools=[TOOL]), headers={"user-agent": "e/1"})
    first, second = seen(http, nonce)
    assert first["path"] == "/v1/chat/completions"
    assert (first["status"], first["ended"]) == (200, True)
    assert (first["model"], first["max_tokens"], first["tools"], first["client"]) == ("hash", 4, 1, "e/1")
    assert first["completion_tokens"] == 4
    assert second["prompt_tokens"] == first["prompt_tokens"] > 16
    assert second["cached_tokens"] > first["cached_tokens"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/responses", {"input": "{nonce}", "max_output_tokens": 3}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "{nonce}"}], "max_tokens": 3}),
        ("/api/chat", {"messages": [{"role": "user", "content": "{nonce}"}], "options": {"num_predict": 3}}),
        ("/completion", {"prompt": "{nonce}", "n_predict": 3}),
    ],
)
def test_limit_of_the_reply_is_reported_in_all_apis(
    http: httpx.Client, nonce: str, path: str, fields: dict[str, Any]
) -> None:
    body = json.dumps({"model": "hash", **fields}).replace("{nonce}", nonce)
    http.post(path, content=body, headers={"content-type": "application/json"})
    [request] = seen(http, nonce)
    assert (request["path"], request["status"], request["ended"]) == (path, 200, True)
    assert (request["max_tokens"], request["completion_tokens"]) == (3, 3)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "tool", "tool_call_id": "1", "content": "{nonce}"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "{nonce}"}]}]}),
        ("/v1/responses", {"input": [{"type": "function_call_output", "call_id": "1", "output": "{nonce}"}]}),
    ],
)
def test_results_of_tools_are_counted_in_all_apis(
    http: httpx.Client, nonce: str, path: str, fields: dict[str, Any]
) -> None:
    body = json.dumps({"model": "hash", **fields}).replace("{nonce}", nonce)
    http.post(path, content=body, headers={"content-type": "application/json"})
    assert [request["tool_results"] for request in seen(http, nonce)] == [1]


def test_refused_request_is_reported_with_its_status(http: httpx.Client, nonce: str) -> None:
    http.post("/v1/chat/completions", json=chat(nonce, model="no such model"))
    [request] = seen(http, nonce)
    assert (request["status"], request["model"], request["prompt_tokens"]) == (404, "no such model", 0)


def test_failed_reply_has_not_ended(tokenizer: Tokenizer, renderer: ChatTemplateRenderer, nonce: str) -> None:
    engine, runner = controlled_engine(tokenizer.vocab_size)
    with (
        LiveServer("hash", engine, tokenizer, renderer) as server,
        httpx.Client(base_url=server.url, trust_env=False) as http,
    ):
        runner.failures = 1
        http.post("/v1/chat/completions", json=chat(nonce, stream=True))
        [request] = seen(http, nonce)
    assert not request["ended"]


def test_records_contain_no_text_of_the_request(http: httpx.Client, nonce: str) -> None:
    http.post("/v1/chat/completions", json=chat(nonce, user="marked-text"))
    answer = http.get("/inglenook/seen", params={"nonce": nonce}).text
    assert nonce not in answer
    assert "marked-text" not in answer
    assert "Say" not in answer


@pytest.mark.parametrize("wrong", ["", "ingle-probe-", "ingle-probe-" + "x" * 32, "word"])
def test_other_texts_cannot_be_searched(http: httpx.Client, wrong: str) -> None:
    assert http.get("/inglenook/seen", params={"nonce": wrong}).status_code == 400


def test_other_keys_see_only_their_own_requests(
    tokenizer: Tokenizer, renderer: ChatTemplateRenderer, nonce: str
) -> None:
    engine, _ = controlled_engine(tokenizer.vocab_size)
    policy = AccessPolicy(Authenticator(["first", "second", "third"], "own"))
    with (
        LiveServer("hash", engine, tokenizer, renderer, policy=policy) as server,
        httpx.Client(base_url=server.url, trust_env=False) as http,
    ):
        http.post("/v1/chat/completions", json=chat(nonce), headers={"x-api-key": "second"})
        found = {
            key: http.get("/inglenook/seen", params={"nonce": nonce}, headers={"x-api-key": key}).json()["requests"]
            for key in ("first", "second", "third", "own")
        }
    assert {key: len(requests) for key, requests in found.items()} == {"first": 1, "second": 1, "third": 0, "own": 1}


def test_oldest_records_are_dropped(http: httpx.Client, nonce: str) -> None:
    http.post("/v1/chat/completions", json=chat(nonce, model="no such model"))
    assert len(seen(http, nonce)) == 1
    other = f"ingle-probe-{secrets.token_hex(16)}"
    for _ in range(MAX_RECORDS):
        http.post("/v1/chat/completions", json=chat(other, model="no such model"))
    assert seen(http, nonce) == []
    assert len(seen(http, other)) == MAX_RECORDS


def has_requests(server: LiveServer, steps: threading.Semaphore) -> bool:
    """Release one step, and return whether the server has requests."""
    steps.release()
    return bool(server.streams.requests())


def test_reply_to_a_nonce_is_stopped_by_it(tokenizer: Tokenizer, renderer: ChatTemplateRenderer, nonce: str) -> None:
    engine, runner = controlled_engine(tokenizer.vocab_size)
    with (
        LiveServer("hash", engine, tokenizer, renderer) as server,
        httpx.Client(base_url=server.url, trust_env=False, timeout=60) as http,
        ThreadPoolExecutor() as threads,
    ):
        body = {"model": "hash", "messages": [{"role": "user", "content": nonce}], "max_tokens": 1000}
        with runner.held() as steps:
            answer = threads.submit(lambda: http.post("/v1/messages", json={**body, "stop_sequences": []}))
            until(lambda: has_requests(server, steps))
            assert http.post("/inglenook/stop", json={"reply": nonce}).json() == {"stopped": True}
        assert answer.result().status_code == 200
        [request] = seen(http, nonce)
    assert request["ended"]
    assert request["completion_tokens"] < 1000
