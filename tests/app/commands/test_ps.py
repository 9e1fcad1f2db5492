"""`ingle ps` with servers in this process: their requests, and servers with invalid responses."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from click.testing import CliRunner
from starlette.responses import Response

from app.cli import ingle
from app.generation.template import ChatTemplateRenderer
from app.process.instance import Instance, recorded
from app.settings.settings import load_settings
from app.text.tokenizer import Tokenizer
from tests.app.server.live_server import LiveServer, controlled_engine
from tests.support.processes import HANGING_SECONDS, until


@pytest.fixture(autouse=True)
def _own_records(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("INGLE_STATE_DIR", str(tmp_path))


def instance(port: int) -> Instance:
    return Instance(4242, port, f"http://127.0.0.1:{port}", "hash", "/hash.gguf", "2026-01-01T00:00:00+00:00")


def test_file_is_named_the_same_for_each_way_to_give_its_path() -> None:
    server = replace(instance(9), model="m.gguf", model_path="/models/m.gguf")
    with recorded(server, load_settings()), recorded(replace(server, port=10, model="/models/m.gguf"), load_settings()):
        assert [line.split()[2] for line in table()[:3]] == ["MODEL", "m", "m"]


def test_engine_of_a_chat_differs_from_a_server_of_the_user() -> None:
    with recorded(replace(instance(1), kind="chat"), load_settings()), recorded(instance(2), load_settings()):
        assert [line.split()[1] for line in table()[:3]] == ["KIND", "chat", "server"]
        assert [one["kind"] for one in json.loads(CliRunner().invoke(ingle, ["ps", "--json"]).stdout)] == [
            "chat",
            "server",
        ]


def listed() -> dict[str, Any]:
    """Return the entry of the only server, from the JSON output."""
    [server] = json.loads(CliRunner().invoke(ingle, ["ps", "--json"]).stdout)
    assert isinstance(server, dict)
    return server


def table() -> list[str]:
    return CliRunner().invoke(ingle, ["ps"]).stdout.splitlines()


def test_requests_are_listed_by_class(tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> None:
    engine, runner = controlled_engine(tokenizer.vocab_size, running=3)

    def ask(service_class: str) -> int:
        body = {"model": "hash", "prompt": "Hi", "max_tokens": 300, "service_class": service_class}
        return httpx.post(f"{server.url}/v1/completions", json=body, timeout=600).status_code

    with (
        LiveServer("hash", engine, tokenizer, renderer) as server,
        recorded(instance(server.port), load_settings()),
        ThreadPoolExecutor(5) as clients,
        runner.held() as steps,
    ):
        idle, idle_table = listed(), table()
        asked = [clients.submit(ask, name) for name in ("interactive", "normal", "normal")]
        server.step_until(steps, running=3, waiting=0)
        asked += [clients.submit(ask, "background") for _ in range(2)]
        server.step_until(steps, running=3, waiting=2)
        busy, busy_table = listed(), table()
        steps.release(1_000_000)
        assert [one.result() for one in asked] == [200] * 5
    assert (idle["status"], idle["running"], idle["waiting"], idle["kv_blocks_held"]) == ("ok", 0, 0, 0)
    assert idle["kv_blocks"] == 512
    assert idle["running_by_class"] == idle["waiting_by_class"] == {"interactive": 0, "normal": 0, "background": 0}
    assert idle_table[4].split() == ["4242", "-", "-", "0", "of", "512", "(0", "%)"]
    assert (busy["running"], busy["waiting"]) == (3, 2)
    assert busy["running_by_class"] == {"interactive": 1, "normal": 2, "background": 0}
    assert busy["waiting_by_class"] == {"interactive": 0, "normal": 0, "background": 2}
    assert busy["kv_blocks_held"] >= 3
    assert busy_table[3].split("  ")[0] == "PID"
    assert "1 interactive, 2 normal  2 background" in busy_table[4]
    assert " of 512 (" in busy_table[4]


def test_prompts_in_prefill_are_listed_with_progress(tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> None:
    engine, runner = controlled_engine(tokenizer.vocab_size, budget=100)

    def ask() -> int:
        body = {"model": "hash", "prompt": [1000] * 1500, "max_tokens": 1}
        headers = {"user-agent": "editor\x1b[2J"}
        return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=600).status_code

    with (
        LiveServer("hash", engine, tokenizer, renderer) as server,
        recorded(instance(server.port), load_settings()),
        ThreadPoolExecutor(1) as clients,
        runner.held() as steps,
    ):
        asked = clients.submit(ask)
        steps.release(5)
        until(lambda: runner.plans == 6)
        busy, busy_table = listed(), table()
        steps.release(1_000_000)
        assert asked.result(HANGING_SECONDS) == 200
        assert listed()["reading"] == []
    assert busy["reading"] == [{"model": "hash", "client": "editor\x1b[2J", "done": 500, "total": 1500}]
    assert busy_table[-1].split() == ["4242", "editor[2J", "500", "(33", "%)", "1,500", "tokens"]


def test_status_of_a_stopped_engine_gives_the_reason(tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> None:
    engine, _ = controlled_engine(tokenizer.vocab_size)
    with LiveServer("hash", engine, tokenizer, renderer) as server, recorded(instance(server.port), load_settings()):
        server.call(server.streams.stop())
        assert listed()["status"] == "it is stopped"
        assert listed()["running"] == 0


@pytest.fixture
def odd_server(tmp_path: Path) -> Iterator[tuple[int, list[bytes]]]:
    """Run a server that is not ingle. Yields its port, and a list whose first item is its response."""
    body = [b""]

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await Response(body[0])(scope, receive, send)

    server = uvicorn.Server(uvicorn.Config(application, port=0, lifespan="off", ws="none", log_config=None))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started)
    yield server.servers[0].sockets[0].getsockname()[1], body
    server.should_exit = True
    thread.join(HANGING_SECONDS)


@pytest.mark.parametrize("answer", [b"", b"[]", b"1", b"{}", b'{"running": 1, "waiting": 2}', b"\xff"])
def test_status_of_an_invalid_response_is_an_error(odd_server: tuple[int, list[bytes]], answer: bytes) -> None:
    port, body = odd_server
    body[0] = answer
    with recorded(instance(port), load_settings()):
        assert "not in the expected format" in listed()["status"]
        assert listed()["running"] is None
        assert table()[4].split() == ["4242", "-", "-", "-"]


def test_status_of_an_unreachable_server_is_an_error() -> None:
    with recorded(instance(1), load_settings()):
        assert "does not respond" in listed()["status"]
        assert listed()["kv_blocks"] is None
        assert "does not respond" in table()[1]
