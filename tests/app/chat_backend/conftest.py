"""Fixtures for a client of the chat that is connected to a server shared by all tests."""

import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from typing import TypeAlias

import pytest

from app.chat_backend.client import TerminalClient
from app.chat_backend.engine import server
from app.generation.template import ChatTemplateRenderer
from app.history.history import History
from app.process.instance import Instance, recorded
from app.server.model_names import ANY_MODEL
from app.settings.settings import Settings, load_settings
from app.text.tokenizer import Tokenizer
from tests.app.server.live_server import LiveServer, controlled_engine

Clients: TypeAlias = Callable[[], AbstractAsyncContextManager[TerminalClient]]


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.delenv("INGLE_MODEL", raising=False)
    folders = {name: tmp_path / name for name in ("models_dir", "cache_dir", "state_dir", "hub_cache")}
    return load_settings(ollama_dir=tmp_path, lmstudio_dir=tmp_path, offline=True, **folders)


@pytest.fixture(scope="session")
def hash_server(tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> Iterator[LiveServer]:
    """A server with the hash model, which answers to all model names."""
    engine, _ = controlled_engine(tokenizer.vocab_size)
    with LiveServer("hash", engine, tokenizer, renderer, aliases={"*": ANY_MODEL}) as server:
        yield server
    engine.assert_empty()


@pytest.fixture
def running(settings: Settings, hash_server: LiveServer) -> Iterator[LiveServer]:
    """Register the shared server, so that chats with these settings find it."""
    instance = Instance(os.getpid(), hash_server.port, hash_server.url, "hash", "/nowhere/hash.gguf", "now")
    with recorded(instance, settings):
        yield hash_server


@pytest.fixture
def clients(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Clients:
    """Return a function that creates clients which share one history."""
    # leases tell processes apart: of two clients in one process, only the first would get one
    monkeypatch.setattr(server, "hold_lease", lambda *_: nullcontext())

    @asynccontextmanager
    async def client() -> AsyncIterator[TerminalClient]:
        made = TerminalClient(settings, History(settings.history_dir), {"stay": False})
        made.start()
        try:
            yield made
        finally:
            await made.close()

    return client
