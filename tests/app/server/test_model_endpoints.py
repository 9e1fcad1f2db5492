"""The server's own API about models: states, memory, loads with progress, and unloads."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.generation.template import ChatTemplateRenderer
from app.generation.token_streams import TokenStreams
from app.models.residency import room
from app.models.residency.advice import Advice, Share
from app.models.residency.load_failures import FULL_SECONDS
from app.models.residency.resident import State
from app.text.tokenizer import Tokenizer
from engine.errors import OutOfMemory
from quant.errors import ModelFileError
from tests.app.server.loading_server import DIGEST, LoadingServer
from tests.support.processes import until


@pytest.fixture
def server(loading_server: LoadingServer) -> LoadingServer:
    return loading_server


@pytest.fixture
def http(server: LoadingServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as http:
        yield http


def models(http: httpx.Client) -> dict[str, dict[str, Any]]:
    return {model["name"]: model for model in http.get("/inglenook/models").json()["models"]}


def load(http: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    answer = http.post("/inglenook/load", json=body)
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def chat(http: httpx.Client, model: str, *, stream: bool = False) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "stream": stream}
    return http.post("/v1/chat/completions", json=body)


def test_models_are_reported_with_states_and_memory(http: httpx.Client) -> None:
    assert list(models(http)) == ["a", "b", DIGEST]
    assert all(model["state"] == "unloaded" and model["memory"] == {} for model in models(http).values())
    assert chat(http, "a").status_code == 200
    report = http.get("/inglenook/models").json()
    assert report["memory"] == {"host": {"available": 50, "free": 50, "promised": 50}}
    loaded, other, embedding = report["models"]
    seconds = loaded.pop("load_seconds")
    assert 0 < seconds < 60
    assert loaded == {
        "name": "a", "names": ["a"], "kind": "chat", "state": "loaded", "stage": None, "progress": None,
        "pinned": False, "expires_in": None, "problem": None, "context_length": 2048,
        "tools": "generic", "size": 50, "stored": True,
        "memory": {"host": {"weights": 50, "steps": 0, "cache": 0, "host_pool": 0, "touched": 0, "tokenizer": 0}},
        "parked": 0,
    }  # fmt: skip
    assert (other["names"], other["state"], other["size"], embedding["kind"]) == (
        ["b", "alias"],
        "unloaded",
        40,
        "embedding",
    )


def test_loaded_model_whose_files_are_removed_is_listed_and_answers(server: LoadingServer, http: httpx.Client) -> None:
    server.loader.path = Path("removed.gguf")
    assert chat(http, "a").status_code == 200
    assert (models(http)["a"]["state"], models(http)["a"]["stored"]) == ("loaded", False)
    assert chat(http, "a").status_code == 200


def test_models_that_do_not_fit_together_are_reported(server: LoadingServer, http: httpx.Client) -> None:
    server.residents.advice.given["a", "b"] = Advice({"host": Share((50, 60), 100)}, "Both fit with context = 5.")
    assert http.get("/inglenook/models").json()["advice"] == [
        {
            "models": ["a", "b"],
            "memory": {"host": {"needed": [50, 60], "available": 100}},
            "remedy": "Both fit with context = 5.",
        }
    ]


def test_load_reports_its_stages_and_its_end(server: LoadingServer, http: httpx.Client) -> None:
    lines = []
    with server.loader.held(), http.stream("POST", "/inglenook/load", json={"model": "alias", "ttl": 90}) as reply:
        assert reply.headers["content-type"] == "application/x-ndjson"
        received = reply.iter_lines()
        while True:
            lines.append(json.loads(next(received)))
            if lines[-1]["state"] == "loading" and lines[-1]["done"] == 3:
                break
            server.loader.parts = 3
        server.loader.release()
        lines += map(json.loads, received)
    stage = {"stage": "Loading b", "done": 3, "total": 10, "unit": "bytes"}
    assert {"model": "alias", "state": "loading", **stage} in lines
    assert set(lines[-1]) == {"model", "state", "seconds"}
    assert (lines[-1]["model"], lines[-1]["state"]) == ("alias", "loaded")
    assert 80 < models(http)["b"]["expires_in"] <= 90
    [line] = load(http, model="b", pin=True)
    assert (line["state"], models(http)["b"]["pinned"], models(http)["b"]["expires_in"]) == ("loaded", True, None)
    load(http, model="b", pin=False, ttl=-1)
    assert (models(http)["b"]["pinned"], models(http)["b"]["expires_in"]) == (False, None)
    assert server.loader.loads == ["b"]


def test_model_without_time_left_is_unloaded(server: LoadingServer, http: httpx.Client) -> None:
    load(http, ttl=0)
    until(lambda: models(http)["a"]["state"] == "unloaded")


def test_load_of_a_client_that_disconnects_is_stopped_unless_half_is_done(
    server: LoadingServer, http: httpx.Client
) -> None:
    for parts, states in ((2, {State.UNLOADED}), (6, {State.LOADING})):
        with server.loader.held():
            server.loader.parts = parts
            with http.stream("POST", "/inglenook/load", json={"model": "a"}) as reply:
                lines = reply.iter_lines()
                while f'"done":{parts}' not in next(lines):
                    pass
            until(lambda: not server.residents.of("a").waiters)
            until(lambda states=states: server.residents.of("a").state in states)  # type: ignore[misc]
    until(lambda: server.residents.of("a").state is State.LOADED)


def test_failed_loads_have_a_status_or_end_with_an_error(server: LoadingServer, http: httpx.Client) -> None:
    answer = http.post("/inglenook/load", json={"model": "/etc/passwd"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    server.loader.sizes["b"] = 101
    for _ in range(2):  # the second request gets the error of the first load
        answer = http.post("/inglenook/load", json={"model": "b"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "model_does_not_fit")
    assert chat(http, "b").status_code == 400
    assert "needs 101 B" in models(http)["b"]["problem"]
    server.loader.errors["a"] = ModelFileError("/home/my user/models/x.gguf is damaged")
    with server.loader.held(), http.stream("POST", "/inglenook/load", json={"model": "a"}) as reply:
        received = reply.iter_lines()
        next(received)
        server.loader.release()
        *_, last = received
    assert json.loads(last)["error"]["message"] == "x.gguf is damaged."
    assert models(http)["a"]["problem"] == "x.gguf is damaged."


def test_load_without_memory_is_unavailable(server: LoadingServer, http: httpx.Client) -> None:
    class Full(dict[str, Exception]):
        def pop(self, name: str, default: Any = None) -> Exception:
            return OutOfMemory("no memory")

    server.loader.errors = Full()
    for answer in (chat(http, "a"), chat(http, "a"), http.post("/inglenook/load", json={"model": "a"})):
        assert (answer.status_code, answer.headers["retry-after"]) == (503, str(round(FULL_SECONDS)))
        assert "although it needs 50 B of 100 B (host): no memory" in answer.json()["error"]["message"]
    assert http.post("/inglenook/load", json={"model": "a"}).status_code == 503
    assert models(http)["a"]["state"] == "failed"
    server.loader.errors = {}
    assert chat(http, "b").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_request_gets_the_error_of_a_start_that_fails(
    server: LoadingServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    async def fail(streams: TokenStreams) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(TokenStreams, "start", fail)
        answer = chat(http, "a", stream=stream)
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        503,
        "a could not be loaded. The log of the server has the details.",
    )
    assert http.get("/inglenook/models").json()["memory"]["host"]["promised"] == 0
    assert chat(http, "b").status_code == 200


def test_unload_waits_for_requests_and_names_the_models(server: LoadingServer, http: httpx.Client) -> None:
    def unload(**body: Any) -> Any:
        return http.post("/inglenook/unload", json=body).json()

    load(http, model="a")
    load(http, model="b")
    body = {"model": "b", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 500, "stream": True}
    with ThreadPoolExecutor() as threads, http.stream("POST", "/v1/chat/completions", json=body) as reply:
        received = reply.iter_lines()
        next(received)
        unloading = threads.submit(unload, model="alias")
        text = "".join(received)
        assert unloading.result() == {"unloaded": ["b"]}
    assert text.endswith("data: [DONE]")
    assert models(http)["b"]["state"] == "unloaded"
    assert unload(model="b") == {"unloaded": []}
    load(http, model=DIGEST)
    assert unload(all=True) == {"unloaded": ["a", DIGEST]}
    assert http.post("/inglenook/unload", json={}).status_code == 400
    assert http.post("/inglenook/unload", json={"model": "none"}).status_code == 404


def test_engine_report_counts_the_tokens_of_all_loaded_models(server: LoadingServer, http: httpx.Client) -> None:
    replies = [chat(http, name).json()["usage"]["completion_tokens"] for name in ("a", "b")]
    report = http.get("/inglenook/engine", params={"model": "a"}).json()
    assert report["generated_tokens"] == sum(replies) > max(replies)
    assert report["computed_tokens"] > report["generated_tokens"]
    http.post("/inglenook/unload", json={"model": "a"})
    report = http.get("/inglenook/engine", params={"model": "a"}).json()
    assert (report["generated_tokens"], report["tiers"]) == (replies[1], [])


def test_background_reply_waits_for_an_urgent_one_of_another_model(
    tokenizer: Tokenizer, renderer: ChatTemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The models do not fit together. The background reply is complete, and the same as without the other request."""
    monkeypatch.setattr(room, "PATIENT_GAP", 0.1)
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200, "ignore_eos": True}
    background = {**body, "model": "a", "service_class": "background"}

    def ask(http: httpx.Client, body: dict[str, Any]) -> str:
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["message"]["content"]
        return text

    with (
        LoadingServer(tokenizer, renderer, memory=60) as server,
        httpx.Client(base_url=server.url, trust_env=False, timeout=60) as http,
        ThreadPoolExecutor() as clients,
    ):
        alone = ask(http, background)
        with server.loader.runners["a"].held() as steps:
            late = clients.submit(ask, http, background)
            steps.release(20)
            other = clients.submit(ask, http, {**body, "model": "b"})

            def is_suspended() -> bool:
                steps.release()
                return server.residents.of("a").suspended is not None

            with server.loader.held():
                until(is_suspended)
                [waiting] = http.get("/inglenook/engine").json()["requests"]
                assert (waiting["model"], waiting["phase"]) == ("a", "preempted")
                assert 0 < waiting["reply_tokens"] < 200
            assert other.result(60)
        assert late.result(60) == alone
        assert server.loader.loads == ["a", "b", "a"]
