"""The chat with models of another machine."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from app.chat_backend.client import TerminalClient
from app.generation.template import ChatTemplateRenderer
from app.process.instance import Instance, recorded
from app.server.application import AccessPolicy
from app.server.http.access import Authenticator
from app.settings.boxes import keep_box
from app.settings.settings import Settings
from app.text.tokenizer import Tokenizer
from tests.app.chat_backend.flows import asked, replied, run_unsaved
from tests.app.server.live_server import LiveServer, controlled_engine
from tests.app.server.shared_machine import share
from tui.client import ClientError
from tui.engine_types import ModelInfo
from tui.types import ReplyEnd, ReplyStarted


@pytest.fixture
def box(
    settings: Settings,
    tmp_path: Path,
    tokenizer: Tokenizer,
    renderer: ChatTemplateRenderer,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[LiveServer]:
    """A shared machine that the chat knows as gpu. Lists of models wait for it."""
    monkeypatch.setattr("app.client.boxes.LIST_SECONDS", 60.0)
    shared = share(tmp_path / "box")
    key = shared.box(1).key
    engine, _ = controlled_engine(tokenizer.vocab_size)
    policy = AccessPolicy(Authenticator(["another-key-of-the-box"], shared_key=lambda: key))
    with LiveServer("big", engine, tokenizer, renderer, policy=policy).use_tls(
        shared.certificate, shared.private_key
    ) as server:
        keep_box(shared.box(server.port), settings.state_dir)
        yield server


async def reply_model(client: TerminalClient) -> str:
    """Ask a question, and return the model that the reply names."""
    new, question = await asked(client)
    started, *_, end = await replied(client, new, question)
    assert isinstance(started, ReplyStarted)
    assert isinstance(end, ReplyEnd)
    assert end.error == ""
    return started.model


@pytest.mark.usefixtures("box")
def test_chat_uses_a_model_of_another_machine(settings: Settings) -> None:
    async def work(client: TerminalClient) -> None:
        assert await reply_model(client) == "gpu/big"
        assert ModelInfo("gpu/big", loaded=True, elsewhere=True) in await client.models.installed()
        assert await client.models.find("gpu/big") == ModelInfo("gpu/big", elsewhere=True)
        assert (await client.models.fit("gpu/big")).verdict == "On your machine gpu"
        assert (await client.engine.status()).model == "gpu/big"

    run_unsaved(replace(settings, model="gpu/big", origins={**settings.origins, "model": "--model"}), work)


@pytest.mark.usefixtures("box")
def test_chat_switches_between_machines(settings: Settings, hash_server: LiveServer) -> None:
    instance = Instance(
        os.getpid(), hash_server.port, hash_server.url, "smollm2:135m", "/nowhere/hash.gguf", "now", serves_all=True
    )

    async def work(client: TerminalClient) -> None:
        assert await reply_model(client) == "smollm2:135m"
        for name in ("gpu/big", "smollm2:135m"):
            async for _ in client.models.load(name):
                pass
            assert await reply_model(client) == name

    with recorded(instance, settings):
        run_unsaved(settings, work)


def test_machine_that_is_away_fails_the_load(settings: Settings, box: LiveServer, hash_server: LiveServer) -> None:
    box.stop()
    instance = Instance(os.getpid(), hash_server.port, hash_server.url, "smollm2:135m", "/nowhere/hash.gguf", "now")

    async def work(client: TerminalClient) -> None:
        assert await reply_model(client) == "smollm2:135m"
        with pytest.raises(ClientError, match="does not respond") as refused:
            async for _ in client.models.load("gpu/big"):
                pass
        assert "Start the server of gpu" in refused.value.remedy
        assert await reply_model(client) == "smollm2:135m"
        assert not [model for model in await client.models.installed() if model.elsewhere]

    with recorded(instance, settings):
        run_unsaved(settings, work)
