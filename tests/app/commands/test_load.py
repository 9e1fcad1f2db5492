"""`ingle load`, `ingle unload`, and the models in `ingle ps`, with a stand-in for a server."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from click.testing import CliRunner, Result
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from app.cli import ingle
from app.errors import EXIT_NOT_FOUND, ModelNotFound, NoServer
from app.process.instance import Instance, recorded
from app.process.listening import ListeningSockets
from app.settings.settings import load_settings
from tests.support.processes import HANGING_SECONDS

HEALTH = {
    "status": "ok", "running": 1, "waiting": 1, "running_by_class": {"normal": 1}, "waiting_by_class": {"normal": 1},
    "kv_blocks": 8, "kv_blocks_held": 2,
}  # fmt: skip
PHASES = ("reading", "waiting")
HOST = {"weights": 98_000_000, "steps": 1, "cache": 400_000_000, "host_pool": 0, "touched": 100_000_000, "tokenizer": 0}


def model(name: str, state: str, **known: object) -> dict[str, object]:
    unknown = dict.fromkeys(("stage", "progress", "expires_in", "load_seconds", "problem"))
    listed = {"name": name, "names": [name, f"alias-of-{name}"], "kind": "chat", "state": state, "pinned": False}
    return {**listed, **unknown, "context_length": 8192, "size": 98_000_000, "memory": {}, **known}


def request(phase: str) -> dict[str, object]:
    return {"model": "alias-of-a", "phase": phase, "client": "editor", "prompt_done": 5, "prompt_total": 10}


@dataclass
class StandIn:
    """A server with given answers, which records its requests."""

    lines: list[object] = field(default_factory=list)  # reply to a load
    unloaded: list[str] = field(default_factory=list)
    models: list[dict[str, object]] = field(default_factory=list)
    missing: bool = False  # whether the server has no such model
    asked: list[tuple[str, Any]] = field(default_factory=list)

    def application(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", lambda _: JSONResponse(HEALTH)),
                Route(
                    "/inglenook/engine", lambda _: JSONResponse({"requests": [request("reading"), request("waiting")]})
                ),
                Route("/inglenook/models", lambda _: JSONResponse({"models": self.models, "memory": {}})),
                Route("/inglenook/load", self._load, methods=["POST"]),
                Route("/inglenook/unload", self._unload, methods=["POST"]),
            ]
        )

    async def _load(self, request: Request) -> Response:
        self.asked.append(("load", await request.json()))
        if self.missing:
            return JSONResponse({"error": {"message": "no model", "code": "model_not_found"}}, 404)
        return StreamingResponse(iter(json.dumps(line) + "\n" for line in self.lines))

    async def _unload(self, request: Request) -> Response:
        self.asked.append(("unload", await request.json()))
        if self.missing:
            return JSONResponse({"error": {"message": "no model", "code": "model_not_found"}}, 404)
        return JSONResponse({"unloaded": self.unloaded})


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StandIn]:
    monkeypatch.setenv("INGLE_STATE_DIR", str(tmp_path))
    server = StandIn()
    http = uvicorn.Server(uvicorn.Config(server.application(), lifespan="off", ws="none", log_config=None))
    with closing(ListeningSockets(0)) as sockets:
        thread = threading.Thread(target=lambda: asyncio.run(http.serve(sockets.sockets)), daemon=True)
        thread.start()
        address = f"http://127.0.0.1:{sockets.port}"
        instance = Instance(4242, sockets.port, address, "a", "/a.gguf", "2026-01-01T00:00:00+00:00", serves_all=True)
        with recorded(instance, load_settings()):
            yield server
        http.should_exit = True
        thread.join(HANGING_SECONDS)


def invoke(*words: str) -> Result:
    return CliRunner().invoke(ingle, words, standalone_mode=False)


def test_load_sends_options_and_reports_the_duration(server: StandIn) -> None:
    server.lines = [
        {"model": "b", "state": "waiting"},
        {"model": "b", "state": "loading", "stage": "Loading b", "done": 1, "total": 2},
        {"model": "b", "state": "loaded", "seconds": 1.25},
    ]
    result = invoke("load", "b", "--pin", "--ttl", "30m")
    assert result.exception is None
    assert "b is loaded (1.2 s)" in result.stderr
    assert server.asked == [("load", {"model": "b", "pin": True, "ttl": 1800.0})]


def test_load_without_options_leaves_them_unchanged(server: StandIn) -> None:
    server.lines = [{"model": "b", "state": "loaded", "seconds": 0.0}]
    assert invoke("load", "b", "-q").stderr == ""
    assert server.asked == [("load", {"model": "b", "pin": None, "ttl": None})]


def test_failed_load_raises_the_error_of_the_server(server: StandIn) -> None:
    server.lines = [{"model": "b", "state": "loading"}, {"error": {"message": "b needs 90 GB", "code": None}}]
    assert str(invoke("load", "b").exception) == "b needs 90 GB"
    server.missing = True
    assert isinstance(invoke("load", "b").exception, ModelNotFound)


@pytest.mark.parametrize("ttl", ["x", "-5m", "1y", ""])
def test_invalid_duration_is_refused(server: StandIn, ttl: str) -> None:
    assert "must be a duration" in str(invoke("load", "b", "--ttl", ttl).exception)
    assert not server.asked


@pytest.mark.parametrize("command", [("load", "b"), ("unload", "b"), ("unload", "--all")])
def test_command_without_a_server_suggests_to_start_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: tuple[str, ...]
) -> None:
    monkeypatch.setenv("INGLE_STATE_DIR", str(tmp_path))
    problem = invoke(*command).exception
    assert isinstance(problem, NoServer)
    assert problem.remedy == "ingle serve"


def test_only_the_server_on_the_given_port_is_used(server: StandIn) -> None:
    assert isinstance(invoke("load", "b", "--port", "1").exception, NoServer)


def test_unload_names_the_models_that_were_loaded(server: StandIn) -> None:
    server.unloaded = ["a", "b"]
    result = invoke("unload", "--all")
    assert result.stderr.splitlines() == ["Unloaded a.", "Unloaded b."]
    assert server.asked == [("unload", {"all": True})]


def test_unload_of_a_model_that_is_not_loaded_fails(server: StandIn) -> None:
    result = invoke("unload", "b")
    assert result.return_value == EXIT_NOT_FOUND
    assert "No server has loaded b." in result.stderr
    server.missing = True
    assert isinstance(invoke("unload", "c").exception, ModelNotFound)


@pytest.mark.parametrize("words", [(), ("b", "--all")])
def test_unload_needs_either_a_name_or_all(server: StandIn, words: tuple[str, ...]) -> None:
    assert "Give the name of a model, or --all." in str(invoke("unload", *words).exception)


def test_ps_lists_models_with_memory_and_requests(server: StandIn) -> None:
    server.models = [
        model("a", "loaded", pinned=True, memory={"host": HOST}),
        model("b", "loading", stage="Loading b", progress=0.43),
        model("c", "failed", problem="c is damaged\x1b[2J"),
        model("d", "loaded", expires_in=1700.0, memory={"host": HOST}),
        model("e", "unloaded"),
    ]
    lines = [" ".join(line.split()) for line in invoke("ps").stdout.splitlines()]
    start = lines.index("PID MODEL REQUESTS WEIGHTS KV CACHE KEPT STATE")
    assert lines[start + 1 : start + 6] == [
        "4242 a 1 reading, 1 waiting 98.0 MB 100 of 400 MB pinned loaded",
        "4242 b - - - - loading 43 %: Loading b",
        "4242 c - - - - failed: c is damaged[2J",
        "4242 d - 98.0 MB 100 of 400 MB 28 min left loaded",
        "",
    ]
    [listed] = json.loads(invoke("ps", "--json").stdout)
    assert [one["name"] for one in listed["models"]] == ["a", "b", "c", "d"]
    assert listed["models"][0]["memory"] == {"host": HOST}
    assert listed["models"][0]["requests"] == {"reading": 1, "waiting": 1}
    assert listed["reading"] == [{"model": "alias-of-a", "client": "editor", "done": 5, "total": 10}]
