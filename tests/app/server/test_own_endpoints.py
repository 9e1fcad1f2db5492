"""The server's own API: engine report, abort, stop, token counts, and removal of a chat from the cache."""

import json
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from app.generation.template import ChatTemplateRenderer
from app.server.application import AccessPolicy
from app.server.http.access import Authenticator
from app.server.own_endpoints import EngineReport
from app.text.tokenizer import Tokenizer
from tests.app.server.live_server import LiveServer, controlled_engine
from tests.support.processes import until

HELLO = [{"role": "user", "content": "Hello there"}]


@pytest.fixture
def http(hash_server: LiveServer) -> Iterator[httpx.Client]:
    with client(hash_server) as http:
        yield http


def client(server: LiveServer, key: str = "none") -> httpx.Client:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.Client(base_url=server.url, headers=headers, trust_env=False, timeout=None)  # noqa: S113


def post(http: httpx.Client, path: str, **body: Any) -> Any:
    answer = http.post(f"/inglenook/{path}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def asked(http: httpx.Client, headers: Mapping[str, str]) -> str:
    """Request a long reply and return its text."""
    body = {"model": "hash", "messages": HELLO, "stream": True, "max_tokens": 100, "ignore_eos": True}
    return http.post("/v1/chat/completions", json=body, headers=headers).text


def has_tokens_or_step(server: LiveServer, steps: threading.Semaphore) -> bool:
    """Release one step, and return whether the only request has output tokens."""
    steps.release()
    return bool(server.streams.requests()[0].output_ids)


def test_request_is_reported_and_aborted(tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> None:
    engine, runner = controlled_engine(tokenizer.vocab_size)
    with LiveServer("hash", engine, tokenizer, renderer) as server, client(server) as http:
        agent = {"User-Agent": "editor/9 " + "x" * 100}
        with client(server) as editor, ThreadPoolExecutor() as threads:
            with runner.held() as steps:
                lines = threads.submit(lambda: asked(editor, agent))
                until(lambda: bool(server.streams.requests()))
                until(lambda: has_tokens_or_step(server, steps))
                report = http.get("/inglenook/engine").json()
                [reported] = report["requests"]
                assert post(http, "abort", id="no such") == {"aborted": False}
                assert post(http, "abort", id=reported["id"]) == {"aborted": True}
            assert '"error"' in lines.result()
        assert http.get("/inglenook/engine").json()["requests"] == []
    assert set(report) == set(EngineReport.__struct_fields__)
    assert reported["client"] == agent["User-Agent"][:80]
    assert (reported["phase"], reported["service_class"]) == ("writing", "normal")
    assert reported["prompt_done"] == reported["prompt_total"] > 0
    assert reported["reply_tokens"] > 0
    assert report["memory"] > 1 << 20
    assert [tier["name"] for tier in report["tiers"]] == ["device", "RAM"]
    assert (report["disk"], report["gpu"]) == (None, None)  # None, because this model is not loaded from a file


def test_token_count_equals_prompt_tokens_of_a_chat(hash_server: LiveServer, http: httpx.Client) -> None:
    counted = post(http, "count", messages=HELLO)
    asked = http.post("/v1/chat/completions", json={"model": "hash", "messages": HELLO, "max_tokens": 1}).json()
    assert counted == {"tokens": asked["usage"]["prompt_tokens"], "context_length": 2048}
    text = "Hello there <|im_start|>"
    assert post(http, "count", text=text)["tokens"] == len(hash_server.service.tokenizer.encode(text))
    assert post(http, "count", text="")["tokens"] == 0
    assert post(http, "count", messages=[{"role": "user", "content": "word " * 3000}])["tokens"] > 3000


def test_forgotten_chat_is_prefilled_again(hash_server: LiveServer, http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "forget me " * 30}]

    def cached() -> int:
        body = {"model": "hash", "messages": messages, "max_tokens": 1}
        answer = http.post("/v1/chat/completions", json=body).json()
        found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    cached()
    assert cached() > 16
    post(http, "forget", messages=messages)
    until(lambda: not hash_server.engine.has_work)
    assert cached() <= 16


def test_other_keys_cannot_see_or_end_requests_of_the_owner(
    tokenizer: Tokenizer, renderer: ChatTemplateRenderer
) -> None:
    engine, runner = controlled_engine(tokenizer.vocab_size)
    with (
        LiveServer(
            "hash", engine, tokenizer, renderer, policy=AccessPolicy(Authenticator(["first", "second"]))
        ) as server,
        client(server, "first") as owner,
        client(server, "second") as other,
        ThreadPoolExecutor() as threads,
        runner.held(),
    ):
        threads.submit(lambda: asked(owner, {}))
        until(lambda: bool(server.streams.requests()))
        [reported] = owner.get("/inglenook/engine").json()["requests"]
        assert other.get("/inglenook/engine").json()["requests"] == []
        assert post(other, "abort", id=reported["id"]) == {"aborted": False}
        assert post(owner, "abort", id=reported["id"]) == {"aborted": True}


def test_stopped_reply_reports_its_usage(tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> None:
    body = {"model": "hash", "messages": HELLO, "stream": True, "max_tokens": 1500, "ignore_eos": True}
    body |= {"stream_options": {"include_usage": True}}
    engine, runner = controlled_engine(tokenizer.vocab_size)
    with LiveServer("hash", engine, tokenizer, renderer) as server, client(server) as http:
        with runner.held() as steps:
            steps.release(10)  # the reply must not end before it is stopped
            with http.stream("POST", "/v1/chat/completions", json=body) as reply:
                lines = (line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: {"))
                first = json.loads(next(lines))
                assert post(http, "stop", reply=first["id"]) == {"stopped": True}
                *_, end, last = map(json.loads, lines)
        assert end["choices"][0]["finish_reason"] == "stop"
        assert 0 <= last["usage"]["completion_tokens"] < 1500
        assert last["usage"]["prompt_tokens"] > 0
        assert post(http, "stop", reply=first["id"]) == {"stopped": False}
        assert http.post("/inglenook/stop", json={"reply": ""}).status_code == 400
