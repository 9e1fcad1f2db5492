"""Tests for the connection to an engine: finding, loading, and replacing engines."""

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.chat_backend.chat_repository import ChatRepository
from app.chat_backend.endpoint import Body, ChatEndpoint, NotOffered
from app.chat_backend.engine.child import ChildMessage
from app.chat_backend.engine.connection import EngineConnection
from app.chat_backend.engine.loading_state import DownloadRate, LoadingState, describe_stage
from app.chat_backend.engine.process import EngineProcess
from app.chat_backend.engine.server import EngineServer, ReadyEngine
from app.chat_backend.models import ChatModels
from app.chat_backend.replies import ChatReplies
from app.chat_backend.tools import ChatTools
from app.errors import EngineFailed
from app.generation.options import DefaultSampling
from app.generation.template import ChatTemplateRenderer
from app.history.history import History
from app.models.sampling_defaults import DEFAULT_SAMPLING
from app.models.transfer.download_turn import DownloadTurn
from app.process.engine_lease import count_other_leases
from app.process.instance import Instance, recorded
from app.progress import SilentProgress
from app.settings.settings import Settings
from app.text.tokenizer import Tokenizer
from engine.system_memory import available_memory
from tests.app.server.live_server import Clock, LiveServer, controlled_engine
from tests.support.fake_endpoint import FakeEndpoint
from tui.client import ClientError
from tui.engine_types import Loading
from tui.types import ChatSettings, MessageId


class StandIn:
    """A fake engine process. Its server is the one that all tests share."""

    started: list["StandIn"]

    def __init__(self, settings: Settings, model: str, server: LiveServer) -> None:
        self.model, self.pid = model, os.getpid()
        self.stopped = self.has_ended = False
        self.said = [ChildMessage(stage="Loading", done=1, total=4, unit="tokens"), ChildMessage(note="nearly")]
        self.fails = model.endswith("org/broken")
        self.is_held = False  # True: it never starts to serve
        self._settings = settings
        self._instance = Instance(self.pid, server.port, server.url, model, f"/nowhere/{model}", "now")
        self._records = ExitStack()
        self._exit = asyncio.Event()

    async def wait_until_serving(self, on_message: Callable[[ChildMessage], None]) -> Instance:
        for said in self.said:
            on_message(said)
            await asyncio.sleep(0.01)
        if self.is_held:
            await asyncio.Event().wait()
        if self.fails:
            raise EngineFailed("it is broken", "mend it")
        self._records.enter_context(recorded(self._instance, self._settings))
        return self._instance

    async def stop(self) -> None:
        self.stopped = True
        self.die()

    async def wait_until_exit(self) -> None:
        await self._exit.wait()

    def die(self) -> None:
        self.has_ended = True
        self._exit.set()
        self._records.close()


@pytest.fixture
def started(settings: Settings, hash_server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[StandIn]]:
    """Replace engine processes with fakes, and return the fakes that were started."""
    found: list[StandIn] = []

    def start(given: Settings, model: str, flags: object) -> StandIn:
        found.append(StandIn(settings, model, hash_server))
        return found[-1]

    monkeypatch.setattr(EngineProcess, "start", start)
    yield found
    for process in found:
        process.die()


@pytest.fixture
def held(settings: Settings, started: list[StandIn], monkeypatch: pytest.MonkeyPatch) -> list[StandIn]:
    """Let the download of the first process never finish."""
    start = EngineProcess.start

    def begin(given: Settings, model: str, flags: Mapping[str, object]) -> EngineProcess:
        process = start(given, model, flags)
        started[0].is_held = True
        return process

    monkeypatch.setattr(EngineProcess, "start", begin)
    return started


async def ready(connection: EngineConnection) -> ReadyEngine:
    async with connection.use() as engine:
        return engine


async def begun(settings: Settings) -> EngineConnection:
    connection = EngineConnection(settings, EngineServer(settings, {"stay": False}))
    connection.start()
    return connection


def test_running_server_is_used(settings: Settings, running: LiveServer, started: list[StandIn]) -> None:
    async def main() -> None:
        connection = await begun(settings)
        engine = await ready(connection)
        assert (engine.model, engine.context_length) == ("hash", 2048)
        assert engine.default_sampling == connection.default_sampling == DEFAULT_SAMPLING.values
        await connection.close()

    asyncio.run(main())
    assert started == []


@pytest.mark.usefixtures("running")
def test_loading_reports_the_model_of_the_running_server(settings: Settings) -> None:
    """The model of the running server may differ from the model in the settings."""

    async def main() -> None:
        connection = await begun(settings)
        await ready(connection)
        assert [(now.model, now.loaded) async for now in connection.loading()] == [("hash", True)]
        await connection.close()

    asyncio.run(main())


def test_remote_ingle_server_reports_default_sampling(
    settings: Settings, tokenizer: Tokenizer, renderer: ChatTemplateRenderer
) -> None:
    async def default_sampling(url: str) -> tuple[Mapping[str, float], Mapping[str, float] | None]:
        connection = EngineConnection(settings, EngineServer(settings, {}, url))
        connection.start()
        assert connection.default_sampling is None  # not loaded
        engine = await ready(connection)
        known = connection.default_sampling
        await connection.close()
        return engine.default_sampling, known

    engine, _ = controlled_engine(tokenizer.vocab_size)
    recommended = {"temperature": 0.3, "top_k": 20}
    with LiveServer("m", engine, tokenizer, renderer, sampling=DefaultSampling(recommended)) as server:
        assert asyncio.run(default_sampling(f"{server.url}/v1")) == (recommended, recommended)
    with FakeEndpoint([]) as other:
        assert asyncio.run(default_sampling(other.url)) == ({}, None)


@pytest.mark.usefixtures("running")
def test_closing_during_connect_closes_the_connection(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    open_ones: list[ChatEndpoint] = []
    is_answered = asyncio.Event()

    class Watched(ChatEndpoint):
        async def call_inglenook(self, method: str, path: str, body: Body | None = None) -> Any:
            answer = await super().call_inglenook(method, path, body)
            open_ones.append(self)
            is_answered.set()
            await asyncio.Event().wait()
            return answer

        async def close(self) -> None:
            await super().close()
            open_ones.remove(self)

    monkeypatch.setattr("app.chat_backend.endpoint.ChatEndpoint", Watched)

    async def main() -> None:
        connection = await begun(settings)
        await is_answered.wait()
        assert open_ones
        await connection.close()
        assert not open_ones

    asyncio.run(main())


def test_engine_is_started_and_its_messages_are_reported(settings: Settings, started: list[StandIn]) -> None:
    async def main() -> None:
        connection = await begun(settings)
        seen = [state async for state in connection.state.states()]
        assert (await ready(connection)).model == "smollm2:135m"
        assert Loading("smollm2:135m", "Loading", 0.25) in seen
        assert seen[-2].stage == "nearly"
        assert seen[-1].loaded
        await connection.close()

    asyncio.run(main())
    assert [(process.model, process.stopped) for process in started] == [("smollm2:135m", False)]
    assert count_other_leases(settings, os.getpid()) == 0


def test_progress_of_a_file_names_the_path_in_its_stages(
    settings: Settings, started: list[StandIn], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The screens shorten this path in the stages of the engine process."""
    (tmp_path / "m.gguf").touch()
    monkeypatch.chdir(tmp_path)

    async def main() -> None:
        connection = await begun(replace(settings, model="m.gguf"))
        seen = [state async for state in connection.state.states()]
        assert {one.model for one in seen if one.stage in ("Loading", "nearly")} == {started[0].model}
        await connection.close()

    asyncio.run(main())
    assert started[0].model == str(tmp_path / "m.gguf")


def test_exit_of_the_engine_and_its_restart_are_reported(settings: Settings, started: list[StandIn]) -> None:
    async def main() -> None:
        connection = await begun(settings)
        models = connection.loaded_models()
        assert (await anext(models)).model == "smollm2:135m"
        started[0].die()
        assert (await anext(models)).model == ""
        assert (await ready(connection)).model == "smollm2:135m"
        assert (await anext(models)).model == "smollm2:135m"
        await models.aclose()
        await connection.close()

    asyncio.run(main())


def test_restart_that_finds_an_engine_with_a_shorter_context_is_reported(
    settings: Settings, hash_server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.chat_backend.engine.server._EXIT_SECONDS", 0.01)
    monkeypatch.setattr("app.chat_backend.engine.connection.SHORT_CONTEXT", 1)
    first = Instance(os.getpid(), hash_server.port, hash_server.url, "hash", "/nowhere/hash.gguf", "first", "chat")

    async def main() -> None:
        with recorded(replace(first, context_length=2048), settings):
            connection = await begun(settings)
            models = connection.loaded_models()
            assert (await anext(models)).warning == ""
            connection._target = replace(connection._target, least_context=8192)
        assert (await anext(models)).model == ""
        with recorded(replace(first, started_at="second"), settings):
            await ready(connection)
            assert (await anext(models)).warning == SHORT
        await models.aclose()
        await connection.close()

    asyncio.run(main())


@pytest.mark.parametrize(("context", "num_started"), [(512, 1), (2047, 1), (2048, 0), (4096, 0)])
def test_restart_uses_only_servers_whose_context_is_as_long(
    settings: Settings, hash_server: LiveServer, started: list[StandIn], context: int, num_started: int
) -> None:
    first = Instance(os.getpid(), hash_server.port, hash_server.url, "hash", "/nowhere/hash.gguf", "first", "chat")
    server = replace(first, port=1, started_at="second", kind="server", context_length=context)

    async def main() -> None:
        with recorded(first, settings):
            connection = await begun(settings)
            assert (await ready(connection)).context_length == 2048
        with recorded(server, settings):
            assert await connection.is_started_elsewhere() == (not num_started)
            await ready(connection)
        await connection.close()

    asyncio.run(main())
    assert len(started) == num_started


def test_first_load_uses_a_server_with_a_short_context(
    settings: Settings, hash_server: LiveServer, started: list[StandIn]
) -> None:
    server = Instance(os.getpid(), hash_server.port, hash_server.url, "hash", "/hash.gguf", "now", context_length=512)

    async def main() -> None:
        connection = await begun(settings)
        assert (await ready(connection)).model == "hash"
        await connection.close()

    with recorded(server, settings):
        asyncio.run(main())
    assert started == []


def test_exit_of_a_server_of_another_program_is_reported(
    settings: Settings, hash_server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.chat_backend.engine.server._EXIT_SECONDS", 0.01)
    instance = Instance(os.getpid(), hash_server.port, hash_server.url, "hash", "/nowhere/hash.gguf", "now")

    async def main() -> None:
        with recorded(instance, settings):
            connection = await begun(settings)
            models = connection.loaded_models()
            assert (await anext(models)).model == "hash"
        assert (await anext(models)).model == ""
        await models.aclose()
        await connection.close()

    asyncio.run(main())


def test_engine_that_another_window_starts_again_is_found(
    settings: Settings, hash_server: LiveServer, started: list[StandIn]
) -> None:
    first = Instance(os.getpid(), hash_server.port, hash_server.url, "hash", "/nowhere/hash.gguf", "first")

    async def main() -> None:
        with recorded(first, settings):
            connection = await begun(settings)
            await ready(connection)
            assert not await connection.is_started_elsewhere()
        assert not await connection.is_started_elsewhere()
        with recorded(replace(first, started_at="second"), settings):
            assert await connection.is_started_elsewhere()
            assert [now.loaded async for now in connection.loading(retry=True)][-1]
            assert not await connection.is_started_elsewhere()
        await connection.close()

    asyncio.run(main())
    assert started == []


@pytest.mark.parametrize(
    ("origin", "shown"),
    [
        ("default", Loading("org/another", "another window is loading it")),
        ("--model", Loading("smollm2:135m", "waiting until another window has loaded org/another")),
    ],
)
def test_model_that_another_window_loads_is_named(
    settings: Settings, held: list[StandIn], origin: str, shown: Loading
) -> None:
    async def main() -> None:
        other = await begun(replace(settings, model="org/another"))
        await until(lambda: bool(held))
        window = await begun(replace(settings, origins={**settings.origins, "model": origin}))
        await until(lambda: window.state.now.stage != "starting")
        assert window.state.now == shown
        await window.close()
        await other.close()

    asyncio.run(main())
    assert len(held) == 1


def test_dead_engine_is_replaced(settings: Settings, started: list[StandIn]) -> None:
    async def main() -> None:
        connection = await begun(settings)
        await ready(connection)
        assert await connection.is_ready()
        started[0].die()
        assert not await connection.is_ready()
        steps = connection.loading(retry=True)
        assert not (await anext(steps)).loaded
        assert connection.is_restarting
        assert [step.loaded async for step in steps][-1]
        assert (await ready(connection)).model == "smollm2:135m"
        assert not connection.is_restarting
        await connection.close()

    asyncio.run(main())
    assert len(started) == 2


def test_switching_replaces_the_model(settings: Settings, started: list[StandIn]) -> None:
    async def main() -> None:
        connection = await begun(settings)
        await ready(connection)
        connection.switch("org/another")
        assert (await ready(connection)).model == "org/another"
        connection.switch("org/broken")
        with pytest.raises(ClientError, match="it is broken"):
            await ready(connection)
        connection.switch("org/another")
        assert (await ready(connection)).model == "org/another"
        await connection.close()

    asyncio.run(main())
    assert [process.stopped for process in started] == [True, True, True, False]


def test_loaded_model_is_not_loaded_again(settings: Settings, started: list[StandIn]) -> None:
    async def main() -> None:
        connection = await begun(settings)
        async with connection.use() as engine:
            connection.switch("smollm2:135m")
            assert [now.loaded async for now in connection.loading()][1:] == [True]
            assert await ready(connection) is engine
        await connection.close()

    asyncio.run(main())
    assert [process.stopped for process in started] == [False]


def test_engine_is_released_when_no_caller_uses_it(settings: Settings, started: list[StandIn]) -> None:
    async def main() -> None:
        connection = await begun(settings)
        # the second switch is requested while the first still waits for the use of the engine to end
        for other in ("org/another", "org/third"):
            async with connection.use() as engine:
                connection.switch("org/overtaken")
                await anext(connection.loading())
                connection.switch(other)
                states = connection.loading()
                while (await anext(states)).stage != "waiting for another request to finish":
                    pass
                await engine.endpoint.call_inglenook("GET", "engine")
                assert not started[-1].stopped
            assert (await ready(connection)).model == other
        await connection.close()

    asyncio.run(main())
    assert [(process.model, process.stopped) for process in started] == [
        ("smollm2:135m", True),
        ("org/another", True),
        ("org/third", False),
    ]


def test_load_names_the_chat_whose_reply_it_waits_for(settings: Settings, started: list[StandIn]) -> None:
    async def main() -> None:
        connection = await begun(settings)
        async with connection.use(reply_in="Dragons"):
            connection.switch("org/another")
            states = connection.loading()
            while "Dragons" not in (await anext(states)).stage:
                pass
        assert (await ready(connection)).model == "org/another"
        await connection.close()

    asyncio.run(main())
    assert len(started) == 2


def test_requested_model_replaces_the_running_one(
    settings: Settings, hash_server: LiveServer, started: list[StandIn]
) -> None:
    async def main() -> None:
        connection = await begun(settings)
        assert (await ready(connection)).model == "hash"
        connection.switch(settings.model)
        assert (await ready(connection)).model == settings.model == "smollm2:135m"
        await connection.close()

    with recorded(Instance(os.getpid(), 1, hash_server.url, "hash", "/nowhere/hash.gguf", "now"), settings):
        asyncio.run(main())
    assert [process.stopped for process in started] == [False]


def test_errors_while_using_the_engine_become_client_errors(settings: Settings, started: list[StandIn]) -> None:
    async def main() -> None:
        connection = await begun(settings)
        with pytest.raises(ClientError, match="no such route"):
            async with connection.use():
                raise NotOffered("no such route", "Ask another.")
        await connection.close()

    asyncio.run(main())
    assert len(started) == 1


def test_failed_load_returns_to_the_previous_model(settings: Settings, started: list[StandIn]) -> None:
    async def main() -> None:
        connection = await begun(settings)
        models = ChatModels(settings, connection)
        await ready(connection)
        seen: list[Loading] = []

        async def load() -> None:
            async for state in models.load("org/broken"):
                seen.append(state)  # noqa: PERF401 # states before an error count as well

        with pytest.raises(ClientError, match="it is broken") as raised:
            await load()
        assert raised.value.remedy == "mend it. smollm2:135m is loaded again."
        assert [one.model for one in seen][-1] == "smollm2:135m"
        assert (await ready(connection)).model == "smollm2:135m"
        assert connection.address
        await models.close()
        await connection.close()

    asyncio.run(main())
    assert [(process.model, process.stopped) for process in started] == [
        ("smollm2:135m", True),
        ("org/broken", True),
        ("smollm2:135m", False),
    ]


@pytest.mark.usefixtures("running", "started")
def test_failed_load_names_the_model_of_the_server_to_which_it_returns(settings: Settings) -> None:
    async def main() -> None:
        connection = await begun(settings)
        await ready(connection)
        connection.switch("org/broken")
        with pytest.raises(ClientError) as raised:
            async for _ in connection.loading():
                pass
        assert raised.value.remedy == "mend it. hash is loaded again."
        await connection.close()

    asyncio.run(main())


def test_failed_return_to_previous_model_reports_both_errors(settings: Settings, started: list[StandIn]) -> None:
    async def main() -> None:
        connection = await begun(settings)
        models = ChatModels(settings, connection)
        await ready(connection)

        async def load() -> None:
            async for _ in models.load("org/broken"):
                for process in started[2:]:
                    process.fails = True

        with pytest.raises(ClientError) as raised:
            await load()
        assert raised.value.message == "it is broken; smollm2:135m could not be loaded again: it is broken"
        await models.close()
        await connection.close()

    asyncio.run(main())


@pytest.mark.parametrize("name", ["quen3:4", "./no-such.gguf", "ollama:none"])
def test_unknown_model_is_rejected_without_unloading(settings: Settings, started: list[StandIn], name: str) -> None:
    async def main() -> None:
        connection = await begun(settings)
        models = ChatModels(settings, connection)
        engine = await ready(connection)
        with pytest.raises(ClientError):
            await anext(models.load(name))
        assert await ready(connection) is engine
        await models.close()
        await connection.close()

    asyncio.run(main())
    assert [process.stopped for process in started] == [False]


def test_unknown_model_is_reported_before_an_engine_starts(settings: Settings, started: list[StandIn]) -> None:
    async def main() -> None:
        connection = await begun(replace(settings, model="nosuch:9b"))
        with pytest.raises(ClientError, match="no model is called nosuch:9b"):
            await ready(connection)
        await connection.close()

    asyncio.run(main())
    assert started == []


def test_failed_first_load_is_reported(settings: Settings, started: list[StandIn]) -> None:
    async def main() -> None:
        connection = await begun(replace(settings, model="org/broken"))
        with pytest.raises(ClientError, match="it is broken") as raised:
            await ready(connection)
        assert raised.value.remedy == "mend it"
        await connection.close()

    asyncio.run(main())
    assert len(started) == 1


def test_failed_first_load_is_retried_for_a_reply(settings: Settings, started: list[StandIn]) -> None:
    async def main() -> None:
        connection = await begun(replace(settings, model="org/broken"))
        for _ in range(2):
            with pytest.raises(ClientError, match="it is broken"):
                await ready(connection)
        chats = ChatRepository(History(None))
        chat = (await chats.create(ChatSettings())).summary.id
        replies = ChatReplies(chats, connection, ChatTools(settings.state_dir))
        for tried in (2, 3):
            with pytest.raises(ClientError, match="it is broken"):
                await anext(replies.reply(chat, MessageId("1")))
            assert len(started) == tried
        await connection.close()

    asyncio.run(main())


def test_reply_in_a_chat_without_a_title_is_named_by_the_first_words(
    settings: Settings, started: list[StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []

    async def main() -> None:
        connection = await begun(replace(settings, model="org/broken"))
        use = connection.use

        def noted(*, retry: bool = False, reply_in: str = "") -> AbstractAsyncContextManager[ReadyEngine]:
            names.append(reply_in)
            return use(retry=retry, reply_in=reply_in)

        monkeypatch.setattr(connection, "use", noted)
        chats = ChatRepository(History(None))
        chat = (await chats.create(ChatSettings())).summary.id
        question = (await chats.add(chat, None, "How much rain is there in Rome?")).id
        replies = ChatReplies(chats, connection, ChatTools(settings.state_dir))
        with pytest.raises(ClientError, match="it is broken"):
            await anext(replies.reply(chat, question))
        await connection.close()

    asyncio.run(main())
    assert names == ["How much rain is there in Rome?"]
    assert started


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.005)


def test_paused_load_resumes_for_a_reply(settings: Settings, held: list[StandIn]) -> None:
    async def main() -> None:
        connection = await begun(settings)
        waiting = asyncio.create_task(ready(connection))
        await until(lambda: connection.state.now.stage == "Loading")
        connection.pause()
        await until(lambda: connection.state.now.stage == "paused at 25 %")
        assert held[0].stopped
        assert not waiting.done()  # the caller waits for the paused load
        async with connection.use(retry=True) as engine:
            assert engine is await waiting
        await connection.close()

    asyncio.run(main())
    assert [process.stopped for process in held] == [True, False]


@pytest.mark.parametrize("other", ["smollm2:135m", "org/another"])
def test_requesting_a_model_ends_a_pause(settings: Settings, held: list[StandIn], other: str) -> None:
    async def main() -> None:
        connection = await begun(settings)
        await until(lambda: bool(held))
        connection.pause()
        connection.switch(other)
        assert (await ready(connection)).model == other
        await connection.close()

    asyncio.run(main())
    assert [process.stopped for process in held] == [True, False]


def test_canceled_load_returns_to_the_previous_model(settings: Settings, started: list[StandIn]) -> None:
    async def main() -> None:
        connection = await begun(settings)
        first = (await ready(connection)).model
        loading = ChatModels(settings, connection).load("qwen3:0.6b")
        await anext(loading)
        await until(lambda: len(started) == 2)
        await loading.aclose()
        assert (await ready(connection)).model == first
        await connection.close()

    asyncio.run(main())
    assert [process.stopped for process in started] == [True, True, False]


def test_canceling_the_first_load_pauses_it(settings: Settings, held: list[StandIn]) -> None:
    async def main() -> None:
        connection = await begun(settings)
        await until(lambda: bool(held))
        loading = ChatModels(settings, connection).load("qwen3:0.6b")
        await anext(loading)
        held[0].is_held = False
        await loading.aclose()
        assert (await ready(connection)).model == settings.model
        again = ChatModels(settings, connection).load(settings.model)
        assert [state.loaded async for state in again][-1]
        await connection.close()

    asyncio.run(main())


def test_closing_while_paused_leaves_no_process(settings: Settings, held: list[StandIn]) -> None:
    async def main() -> None:
        connection = await begun(settings)
        await until(lambda: bool(held))
        connection.pause()
        await connection.close()

    asyncio.run(main())
    assert [process.stopped for process in held] == [True]


def test_download_of_the_engine_is_listed_and_can_be_paused(settings: Settings, held: list[StandIn]) -> None:
    """The test process plays the engine process that downloads."""

    async def main() -> None:
        connection = await begun(settings)
        models = ChatModels(settings, connection)
        await until(lambda: bool(held))
        turn = DownloadTurn(settings.models_dir, "smollm2:135m")
        with turn.hold(SilentProgress()) as shown, shown.task("Downloading", 100):
            for there in (await models.installed(), await models.catalog()):
                [one] = [model for model in there if model.name == "smollm2:135m"]
                assert (one.fetching, one.loaded, one.installed) == (True, False, False)
            steps = models.pull("smollm2:135m")
            assert (await anext(steps)).total == 100
            await steps.aclose()
        await until(lambda: connection.state.now.stage.startswith("paused"))
        assert not any(model.fetching for model in await models.catalog())
        assert [step.stage async for step in models.pull("smollm2:135m")][-1] == "loaded"
        await models.close()
        await connection.close()

    asyncio.run(main())
    assert [process.stopped for process in held] == [True, False]


def test_loading_states_end_with_the_final_state_or_the_error() -> None:
    async def main() -> None:
        state = LoadingState("m")

        async def listen() -> list[str]:
            return [one.stage async for one in state.states()]

        first = asyncio.create_task(listen())
        await asyncio.sleep(0)
        state.show(Loading("m", "half", 0.5))
        await asyncio.sleep(0)
        state.finish()
        assert await first == ["starting", "half"]
        assert await listen() == ["half"]
        failed = LoadingState("m")
        failed.finish(ClientError("no"))
        with pytest.raises(ClientError, match="no"):
            [one async for one in failed.states()]

    asyncio.run(main())


def test_download_stage_has_speed_and_time_left() -> None:
    clock = Clock()
    rate = DownloadRate(clock)

    def after(done: int) -> Loading:
        return describe_stage("m", "Downloading", done, 90_000_000, "bytes", rate)

    assert after(0) == Loading("m", "Downloading", 0.0, amount="0.0 of 90.0 MB")
    clock.seconds += 1
    assert after(18_000_000).amount == "18.0 of 90.0 MB"
    clock.seconds += 1
    assert after(18_010_000).amount == "18.0 of 90.0 MB"
    clock.seconds += 1
    assert after(30_000_000) == Loading("m", "Downloading", 1 / 3, amount="30.0 of 90.0 MB, 6.0 MB/s, 10 s left")
    clock.seconds += 60
    assert rate.after("Downloading", 30_000_000) == 0
    assert rate.after("another", 7) == 0


def test_memory_of_an_unshared_engine_is_reclaimable(
    settings: Settings, started: list[StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        connection = await begun(settings)
        assert await connection.reclaimable_memory() == 0  # no engine is loaded, so nothing can be reclaimed
        await ready(connection)
        assert await connection.reclaimable_memory() > available_memory() // 2
        monkeypatch.setattr("app.chat_backend.engine.server.count_other_leases", lambda settings, pid: 1)
        assert await connection.reclaimable_memory() == 0  # another process also uses the engine, so it stays loaded
        monkeypatch.undo()
        await connection.close()

    asyncio.run(main())


LOWERED = "the model supports 2,048 tokens: --context 4096 is lowered to that"
SHORT = "this server's context is 2,048 tokens. Run ingle stop to use a longer one."
OTHER = "this server's context is 2,048 tokens. Run ingle stop to use --context {}."


@pytest.mark.parametrize(
    ("runs", "context", "warning"),
    [
        (False, 0, ""),
        (False, 512, ""),
        (False, 2048, ""),
        (False, 4096, LOWERED),
        (True, 0, SHORT),
        (True, 512, OTHER.format(512)),
        (True, 2048, ""),
        (True, 4096, OTHER.format(4096)),
    ],
)
def test_context_other_than_requested_is_a_warning(
    settings: Settings, request: pytest.FixtureRequest, started: list[StandIn], context: int, runs: bool, warning: str
) -> None:
    if runs:
        request.getfixturevalue("running")
    asked = replace(settings, context=context, origins={**settings.origins, "context": "--context"})

    async def main() -> str:
        connection = await begun(asked)
        await ready(connection)
        [state] = [now async for now in connection.loading()]
        await connection.close()
        return state.warning

    assert asyncio.run(main()) == warning


def test_long_context_of_a_running_server_needs_no_warning(
    settings: Settings, running: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.chat_backend.engine.connection.SHORT_CONTEXT", 2048)

    async def main() -> str:
        connection = await begun(settings)
        await ready(connection)
        [state] = [now async for now in connection.loading()]
        await connection.close()
        return state.warning

    assert asyncio.run(main()) == ""


def test_endpoint_is_named_by_its_url_until_its_model_is_known(settings: Settings) -> None:
    address = "http://127.0.0.1:9/v1"
    assert EngineConnection(settings, EngineServer(settings, {}, address)).state.now == Loading(address, "connecting")
    asked = replace(settings, model="theirs", origins={**settings.origins, "model": "--model"})
    assert EngineConnection(asked, EngineServer(asked, {}, address)).state.now == Loading("theirs", "connecting")
    assert EngineConnection(settings, EngineServer(settings, {})).state.now == Loading(settings.model, "starting")
