"""Several models through the API of llama.cpp's router, with the requests of the editor Zed.

Zed lists the models, reads the properties of those that are loaded, and follows the events about their states.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from app.models.residency.resident import State
from quant.errors import ModelFileError
from tests.app.server.live_server import LiveServer
from tests.app.server.loading_server import DIGEST, LoadingServer
from tests.support.processes import until

# The members of Zed's request for a chat.
CHAT = {
    "model": "b",
    "messages": [{"role": "user", "content": "Hi"}],
    "stream": True,
    "max_tokens": 2,
    "stream_options": {"include_usage": True},
}


@pytest.fixture
def http(loading_server: LoadingServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=loading_server.url, trust_env=False, timeout=60) as http:
        yield http


def statuses(http: httpx.Client) -> dict[str, Any]:
    listed = http.get("/v1/models", headers={"Accept": "application/json"}).json()["data"]
    assert all("text" in model["architecture"]["input_modalities"] for model in listed)
    return {model["id"]: model["status"] for model in listed}


@contextmanager
def followed(http: httpx.Client) -> Iterator[Iterator[dict[str, Any]]]:
    """Yield the events about models, read as Zed reads them."""
    with http.stream("GET", "/models/sse", headers={"Accept": "text/event-stream"}) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = reply.iter_lines()
        yield (json.loads(line.removeprefix("data:")) for line in lines if line.startswith("data:"))


def next_event(events: Iterator[dict[str, Any]], model: str, status: str) -> dict[str, Any]:
    """Return the data of the next event with this status of a model."""
    found: dict[str, Any] = next(
        it["data"]
        for it in events
        if (it["model"], it["data"]["status"], it["event"]) == (model, status, "model_status")
    )
    return found


def test_chat_loads_a_listed_model_and_events_report_it(loading_server: LoadingServer, http: httpx.Client) -> None:
    assert statuses(http) == {name: {"value": "unloaded"} for name in ("a", "b", "alias", DIGEST)}
    with followed(http) as events:
        reply = http.post("/v1/chat/completions", json=CHAT)
        chunks = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
        assert chunks[-1]["usage"]["completion_tokens"] == 2
        assert next_event(events, "alias", "loaded") == {"status": "loaded"}
        assert statuses(http)["b"] == statuses(http)["alias"] == {"value": "loaded"}
        assert http.post("/models/unload", json={"model": "b"}).json() == {"success": True}
        assert next_event(events, "alias", "unloaded") == {"status": "unloaded", "exit_code": 0}
    assert loading_server.loader.loads == ["b"]


def test_started_load_reports_progress(loading_server: LoadingServer, http: httpx.Client) -> None:
    with followed(http) as events:
        with loading_server.loader.held():
            assert http.post("/models/load", json={"model": DIGEST}).json() == {"success": True}
            until(lambda: loading_server.residents.of(DIGEST).state is State.LOADING)
            assert statuses(http)[DIGEST] == {"value": "loading"}
            assert http.post("/models/load", json={"model": DIGEST}).status_code == 400
            loading_server.loader.parts = 4
            event = next(events)
            while event["data"]["progress"]["value"] != 0.4:
                event = next(events)
            assert event == {
                "model": DIGEST,
                "event": "model_status",
                "data": {
                    "status": "loading",
                    "progress": {"stages": ["text_model"], "current": "text_model", "value": 0.4},
                },
            }
        next_event(events, DIGEST, "loaded")
    assert statuses(http)[DIGEST] == {"value": "loaded"}


def test_events_end_when_the_server_stops(loading_server: LoadingServer, http: httpx.Client) -> None:
    with followed(http) as events:
        loading_server.call(loading_server.residents.close())
        assert list(events) == []


def test_failed_load_is_reported(loading_server: LoadingServer, http: httpx.Client) -> None:
    loading_server.loader.errors["b"] = ModelFileError("/home/me/b.gguf is damaged")
    with followed(http) as events:
        assert http.post("/models/load", json={"model": "b"}).status_code == 200
        assert next_event(events, "b", "unloaded") == {"status": "unloaded", "exit_code": 1}
    failed = {"value": "unloaded", "failed": True, "exit_code": 1, "problem": "b.gguf is damaged."}
    assert statuses(http)["b"] == failed


def test_load_is_stopped_by_an_unload(loading_server: LoadingServer, http: httpx.Client) -> None:
    with loading_server.loader.held():
        loading_server.loader.parts = 9
        http.post("/models/load", json={"model": "b"})
        until(lambda: (task := loading_server.residents.of("b").task) is not None and task.done == 9)
        assert http.post("/models/unload", json={"model": "b"}).json() == {"success": True}
        until(lambda: loading_server.residents.of("b").state is State.UNLOADED)
    for path in ("load", "unload"):
        assert http.post(f"/models/{path}", json={"model": "none"}).status_code == 404
    refused = http.post("/models/unload", json={"model": "b"})
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, "model: b is not loaded.")


def test_properties_are_reported_without_a_load(loading_server: LoadingServer, http: httpx.Client) -> None:
    server = http.get("/props").json()
    assert (server["role"], server["model_alias"], server["models_autoload"]) == ("router", "a", True)
    model = http.get(f"/props?model={quote('alias', safe='')}").json()
    assert (model["role"], model["model_alias"], model["is_sleeping"]) == ("model", "b", True)
    assert model["default_generation_settings"]["n_ctx"] == 2048
    assert http.get("/slots?model=b").json() == []
    assert http.get(f"/props?model={DIGEST}").status_code == 400
    assert http.get("/props?model=none").status_code == 404
    assert http.get("/metrics?model=b").status_code == 200
    assert loading_server.loader.loads == []


def test_properties_of_a_loaded_model_name_its_abilities(hash_server: LiveServer) -> None:
    model = httpx.get(f"{hash_server.url}/props?model=hash", trust_env=False).json()
    assert model["chat_template_caps"] == {"supports_tools": True, "supports_tool_calls": True}
    assert (model["is_sleeping"], model["total_slots"]) == (False, 32)


def test_request_without_autoload_does_not_load(loading_server: LoadingServer, http: httpx.Client) -> None:
    refused = http.post("/v1/chat/completions?autoload=false", json=CHAT)
    assert (refused.status_code, refused.json()["error"]["message"]) == (
        400,
        "model: b is not loaded. Leave out autoload.",
    )
    assert loading_server.loader.loads == []
    assert http.post("/v1/chat/completions?autoload=true", json=CHAT).status_code == 200
    assert http.post("/v1/chat/completions?autoload=false", json=CHAT).status_code == 200
