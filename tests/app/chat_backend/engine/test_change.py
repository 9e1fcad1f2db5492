"""Tests for changing the model of the server in use, with a server that loads hash models on demand."""

import asyncio
import os
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from app.chat_backend.engine.connection import EngineConnection
from app.chat_backend.engine.process import EngineProcess
from app.chat_backend.engine.server import EngineServer
from app.errors import EngineFailed, Offline
from app.generation.template import ChatTemplateRenderer
from app.models.pulls import PullProgress, PullState
from app.process.instance import Instance, recorded
from app.settings.settings import Settings
from app.text.tokenizer import Tokenizer
from engine.errors import EngineError
from tests.app.server.loading_server import DIGEST, LoadingServer
from tests.support.processes import HANGING_SECONDS
from tui.client import ClientError
from tui.engine_types import Loading

QUESTION = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20}


@dataclass
class Shelf:
    """The names of the models that are stored on this machine."""

    names: list[str]

    def stored_name(self, settings: Settings) -> str | None:
        return settings.model if settings.model in self.names else None


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> Shelf:
    shelf = Shelf(["a", "b", DIGEST])
    monkeypatch.setattr("app.client.running_server._stored_name", shelf.stored_name)
    return shelf


@pytest.fixture
def server(
    settings: Settings,
    shelf: Shelf,
    tokenizer: Tokenizer,
    renderer: ChatTemplateRenderer,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[LoadingServer]:
    """Run a server of the models of the shelf. No chat may start another process."""

    def start(*_: object) -> EngineProcess:
        raise EngineFailed("no process may start")

    monkeypatch.setattr(EngineProcess, "start", start)
    with LoadingServer(tokenizer, renderer) as server:
        address = f"http://127.0.0.1:{server.port}"
        instance = Instance(os.getpid(), server.port, address, "a", "/nowhere/a.gguf", "now", serves_all=True)
        with recorded(instance, settings):
            yield server


async def begun(settings: Settings) -> EngineConnection:
    connection = EngineConnection(settings, EngineServer(settings, {"stay": False}))
    connection.start()
    async with asyncio.timeout(HANGING_SECONDS), connection.use() as engine:
        assert engine.model == "a"
    return connection


async def states_of(connection: EngineConnection) -> list[Loading]:
    return [state async for state in connection.loading()]


async def until_stage(connection: EngineConnection, stage: str) -> None:
    while connection.state.now.stage != stage:
        await asyncio.sleep(0.005)


def test_change_waits_for_no_reply_and_keeps_the_server(settings: Settings, server: LoadingServer) -> None:
    async def main() -> None:
        connection = await begun(settings)
        assert not await connection.waits_for_replies("b")
        async with connection.use(reply_in="a long reply") as before:
            with server.loader.held():
                state = connection.switch("b")
                server.loader.parts = 5
                await until_stage(connection, "Loading b")
                assert connection.model == "a"
            await state.wait()
            async with connection.use() as after:
                assert (after.model, after.context_length) == ("b", 2048)
                assert after.endpoint is before.endpoint
                texts = [await one.endpoint.complete({**QUESTION, "model": one.model}) for one in (before, after)]
                assert all(texts)
        assert server.loader.loads == ["a", "b"]
        await connection.close()

    asyncio.run(main())


def test_loaded_model_is_used_again_without_a_load(settings: Settings, server: LoadingServer) -> None:
    async def main() -> None:
        connection = await begun(settings)
        for name in ("b", "a", "b"):
            await connection.switch(name).wait()
            assert connection.answering == name
        assert server.loader.loads == ["a", "b"]
        await connection.close()

    asyncio.run(main())


@pytest.mark.parametrize(("name", "words"), [("b", "b is damaged"), (DIGEST, "digest generates no text")])
def test_failed_change_returns_to_the_previous_model(
    settings: Settings, server: LoadingServer, name: str, words: str
) -> None:
    server.loader.errors["b"] = EngineError("b is damaged")

    async def main() -> None:
        connection = await begun(settings)
        connection.switch(name)
        with pytest.raises(ClientError, match=words):
            await states_of(connection)
        async with connection.use() as engine:
            assert engine.model == "a"
            assert await engine.endpoint.complete({**QUESTION, "model": engine.model})
        await connection.close()

    asyncio.run(main())


def test_canceled_change_stops_the_load(settings: Settings, server: LoadingServer) -> None:
    async def main() -> None:
        connection = await begun(settings)
        with server.loader.held():
            wanted = connection.switch("b")
            await until_stage(connection, "Loading b")
            connection.cancel_switch(wanted)
            async with asyncio.timeout(HANGING_SECONDS):
                async with connection.use() as engine:
                    assert engine.model == "a"
                while server.residents.of("b").task is not None:
                    await asyncio.sleep(0.005)
        assert server.residents.of("b").loaded is None
        await connection.close()

    asyncio.run(main())


def test_paused_change_resumes_in_the_same_server(settings: Settings, server: LoadingServer) -> None:
    async def main() -> None:
        connection = await begun(settings)
        with server.loader.held():
            connection.switch("b")
            await until_stage(connection, "Loading b")
            connection.pause()
            await until_stage(connection, "paused at 0 %")
        connection.resume()
        async with asyncio.timeout(HANGING_SECONDS), connection.use() as engine:
            assert engine.model == "b"
        await connection.close()

    asyncio.run(main())


@pytest.mark.parametrize("problem", [None, Offline("the Hub is unreachable")])
def test_missing_model_is_downloaded_before_the_change(
    settings: Settings, server: LoadingServer, shelf: Shelf, monkeypatch: pytest.MonkeyPatch, problem: Offline | None
) -> None:
    async def pull(self: object, name: str) -> AsyncGenerator[PullProgress, None]:
        assert name == "org/new"
        yield PullProgress(name, PullState.RUNNING, "Downloading org/new", 1, 4)
        await asyncio.sleep(0.01)
        if problem is not None:
            raise problem
        shelf.names.append(name)
        server.loader.sizes[name] = 10

    monkeypatch.setattr("app.models.pulls.Pulls.pull", pull)

    async def main() -> None:
        connection = await begun(settings)
        connection.switch("org/new")
        if problem is None:
            states = await states_of(connection)
            assert any((state.stage, state.fraction) == ("Downloading org/new", 0.25) for state in states)
            assert connection.answering == "org/new"
        else:
            with pytest.raises(ClientError, match="unreachable"):
                await states_of(connection)
            assert connection.answering == "a"
        await connection.close()

    asyncio.run(main())


def test_chat_that_names_another_stored_model_uses_the_server(settings: Settings, server: LoadingServer) -> None:
    async def main() -> None:
        named = replace(settings, model="b", origins={**settings.origins, "model": "--model"})
        connection = EngineConnection(named, EngineServer(named, {"stay": False}))
        connection.start()
        async with asyncio.timeout(HANGING_SECONDS), connection.use() as engine:
            assert engine.model == "b"
        await connection.close()

    asyncio.run(main())


def test_file_without_a_name_needs_another_process(settings: Settings, server: LoadingServer, tmp_path: Path) -> None:
    file = tmp_path / "own.gguf"
    file.write_bytes(b"GGUF")

    async def main() -> None:
        connection = await begun(settings)
        assert await connection.waits_for_replies(str(file))
        connection.switch(str(file))
        with pytest.raises(ClientError, match="no process may start"):
            await states_of(connection)
        assert connection.answering == "a"
        await connection.close()

    asyncio.run(main())
