"""Programs that are set up for a model of another machine: they use the server of this one."""

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from app.connect.clients import find_client
from app.connect.connection import Connection
from app.connect.serving import lasting_connection, served
from app.errors import NoServer
from app.generation.template import ChatTemplateRenderer
from app.process.instance import BoxInstance, Instance, recorded
from app.progress import SilentProgress
from app.settings.settings import Settings, load_settings
from app.text.tokenizer import Tokenizer
from tests.app.server.shared_machine import LAPTOP_KEY, TwoMachines, two_machines

CLIENT = find_client("llm")


@pytest.fixture
def machines(tmp_path: Path, tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> Iterator[TwoMachines]:
    with two_machines(tmp_path, tokenizer, renderer) as machines:
        yield machines


@pytest.fixture
def settings(machines: TwoMachines, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(machines.laptop_state / "config"))
    key = machines.laptop_state / "own-key"
    key.write_text(LAPTOP_KEY)
    key.chmod(0o600)
    return load_settings(state_dir=machines.laptop_state, model="gpu/big", offline=True)


def laptop_of(machines: TwoMachines) -> Instance:
    server = machines.laptop
    return Instance(os.getpid(), server.port, server.url, "small", "/nowhere/small.gguf", "now", serves_all=True)


def assert_answers(connection: Connection) -> None:
    headers = {"authorization": f"Bearer {connection.key}"}
    body = {"model": connection.model, "prompt": "Hi", "max_tokens": 2}
    reply = httpx.post(f"{connection.base_url}/v1/completions", json=body, headers=headers)
    assert (reply.status_code, reply.json()["model"]) == (200, "gpu/big")


def test_program_uses_a_model_of_another_machine_by_the_server_of_this_one(
    machines: TwoMachines, settings: Settings
) -> None:
    async def work() -> None:
        async with served(CLIENT, settings, SilentProgress()) as found:
            assert found.connection.base_url == machines.laptop.url
            assert found.connection.context_length == 2048
            assert isinstance(found.instance, BoxInstance)
            await asyncio.to_thread(assert_answers, found.connection)

    with recorded(laptop_of(machines), settings):
        asyncio.run(work())
        connection, server = asyncio.run(lasting_connection(CLIENT, settings))
    assert server == laptop_of(machines)
    assert connection.base_url == machines.laptop.url
    assert_answers(connection)


def test_server_of_this_machine_is_necessary(machines: TwoMachines, settings: Settings) -> None:
    async def work() -> None:
        async with served(CLIENT, settings, SilentProgress()):
            pass

    with pytest.raises(NoServer) as refused:
        asyncio.run(work())
    assert refused.value.remedy == "ingle serve"
    with pytest.raises(NoServer, match="on to gpu"):
        asyncio.run(lasting_connection(CLIENT, replace(settings, port=1)))
