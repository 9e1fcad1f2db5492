"""The engine that the chat uses: a running server, a process started by the chat, or a remote endpoint.

Loading runs in the background; callers that need the model wait for it with `use`. The engine is replaced only when no
caller uses it. If a model cannot be loaded, the previous one is loaded again. If the engine process has died, the next
call of `use` restarts it. The HTTP client is imported only when a server is contacted, so that the chat starts fast.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from dataclasses import replace as replaced
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.chat_backend.client_errors import client_errors
from app.chat_backend.engine.child import ChildMessage
from app.chat_backend.engine.loading_state import DownloadRate, LoadingState, describe_stage
from app.chat_backend.engine.process import EngineProcess
from app.client.running_server import find_instance
from app.errors import AppError
from app.models.transfer.download_turn import Running, running_download
from app.process.engine_lease import count_other_leases, hold_lease
from app.process.instance import Instance, running_instances
from app.settings.api_keys import own_key
from app.settings.settings import Settings
from engine.private_folder import private_folder
from quant.errors import InglenookError
from tui.client import ClientError, NotLoaded
from tui.engine_types import Loading

if TYPE_CHECKING:
    from app.chat_backend.endpoint import ChatEndpoint, ServedName

_WAKE_SECONDS = 5.0  # maximum time from the registration of a new server to its first answer
_LOAD_SECONDS = 1800.0  # maximum time that a remote server may take to load its model
_TURN_SECONDS = 0.2  # seconds between two checks whether another chat has started the engine


@dataclass(frozen=True, slots=True)
class ReadyEngine:
    """An engine with a loaded model."""

    endpoint: "ChatEndpoint"
    model: str
    context_length: int | None  # None: unknown
    default_sampling: Mapping[str, float] = field(default_factory=dict)  # the model's recommended sampling


@dataclass(frozen=True, slots=True)
class _TargetModel:
    """The model to load."""

    model: str
    is_required: bool  # True: only this model is acceptable; False: any loaded model is


class EngineConnection:
    """Finds or starts the engine, and replaces it when the user switches the model.

    Used on one event loop. Call `start` first and `close` at the end.
    """

    def __init__(
        self, settings: Settings, flags: Mapping[str, object], endpoint: str = "", key: str | None = None
    ) -> None:
        """Store the configuration. `start` finds or starts the engine.

        `flags` are the settings from the command line and `stay`; an engine process is started with them. `endpoint` is
        the base URL of another server, and `key` is its API key.
        """
        self._settings = settings
        self._flags = flags
        self._remote = endpoint
        self._key = key
        self._process: EngineProcess | None = None
        self._engine: ReadyEngine | None = None
        self._leases = ExitStack()  # while this process holds a lease, the engine keeps running
        self._task: asyncio.Task[None] | None = None
        self._target = _TargetModel(settings.model, settings.origins["model"] != "default")
        self._served: _TargetModel | None = None  # the target that was loaded last
        self._previous: _TargetModel | None = None  # the target before the last switch
        self._uses = 0
        self._reply_titles: list[str] = []  # titles of the chats whose replies use the engine
        self._unused = asyncio.Event()
        self._instance: Instance | None = None  # registry entry of the server in use
        self.is_paused = False  # whether loading is paused until `resume`
        self.state = self._state_of(self._target)

    def start(self) -> None:
        """Start to find or launch the engine in the background."""
        self._task = asyncio.create_task(self._load(self._target))

    async def close(self) -> None:
        """Release the engine. It exits when no other client needs it."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        if self._process is not None and self._engine is None:  # no client can use it yet
            await self._process.stop()
        if self._engine is not None:
            await self._engine.endpoint.close()
        self._leases.close()

    @property
    def is_remote(self) -> bool:
        """Whether the user named a remote endpoint."""
        return bool(self._remote)

    @property
    def is_chosen(self) -> bool:
        """Whether the user chose a model or an endpoint."""
        return self.is_remote or self._settings.origins["model"] != "default"

    @property
    def address(self) -> str:
        return "" if self._engine is None else self._engine.endpoint.url

    @property
    def model(self) -> str:
        """The name of the loaded model, or of the one to load."""
        return self._settings.model if self._engine is None else self._engine.model

    @property
    def answering(self) -> str:
        """The name of the loaded model, or "" if none is loaded."""
        return "" if self._engine is None else self._engine.model

    @property
    def awaited(self) -> str:
        """The model that the local engine is loading, also if loading is paused; "" if there is none."""
        is_loading = self._task is not None and not self.state.is_over
        return self._target.model if is_loading and not self._remote else ""

    @property
    def context_length(self) -> int | None:
        """Context length of the loaded model in tokens, or None if unknown."""
        return None if self._engine is None else self._engine.context_length

    @property
    def default_sampling(self) -> Mapping[str, float] | None:
        """The loaded model's recommended sampling. None if unknown: no model is loaded, or the server reports none."""
        engine = self._engine
        if engine is None or not (engine.default_sampling or engine.endpoint.is_inglenook):
            return None
        return engine.default_sampling

    async def offered_models(self) -> "Sequence[ServedName]":
        """Return the models of the remote endpoint. Raises ClientError."""
        from app.chat_backend.endpoint import ChatEndpoint

        with client_errors():
            endpoint = ChatEndpoint(self._remote, self._key, is_inglenook=False)
            try:
                return await endpoint.names()
            finally:
                await endpoint.close()

    async def reclaimable_memory(self) -> int:
        """Return the bytes available to another model once this engine is unloaded.

        Returns 0 if unloading frees nothing, because the engine is not loaded or other programs use it.
        """
        process, engine = self._process, self._engine
        if process is None or engine is None or await asyncio.to_thread(self._is_shared, process):
            return 0
        with suppress(InglenookError):  # the engine may be exiting
            report = await engine.endpoint.call_inglenook("GET", "engine")
            return int(report["room"])
        return 0

    async def decode_rate(self) -> float:
        """Return the weight bytes per second that the loaded engine has measured; 0 if it is unknown."""
        engine = self._engine
        if engine is not None and engine.endpoint.is_inglenook:
            with suppress(InglenookError):  # the engine may be exiting
                return float((await engine.endpoint.call_inglenook("GET", "engine")).get("decode_rate", 0.0))
        return 0.0

    def _is_shared(self, process: EngineProcess) -> bool:
        return count_other_leases(self._settings, process.pid) > 0

    @asynccontextmanager
    async def use(self, *, retry: bool = False, reply_in: str = "") -> AsyncIterator[ReadyEngine]:
        """Wait for the engine and keep it while the body runs. Raises ClientError; errors of the body are converted to
        it.

        With `retry`, a load that failed is tried again. `reply_in`: title of the chat in which a reply is generated.
        Not reentrant: nested use would deadlock with a pending model switch.
        """
        engine = await self._ready(retry)
        self._uses += 1
        self._reply_titles += [reply_in] if reply_in else []
        try:
            with client_errors():
                yield engine
        finally:
            self._uses -= 1
            if reply_in:
                self._reply_titles.remove(reply_in)
            if not self._uses:
                self._unused.set()

    async def is_lost(self) -> bool:
        """Whether the server in use has exited. The next `use` restarts the engine."""
        return self.state.is_over and await asyncio.to_thread(self._is_lost)

    async def _ready(self, retry: bool) -> ReadyEngine:
        if retry:
            self.resume()
        if await self.is_lost():
            self._start_target(self._target)
        state = None
        while state is not self.state:  # the user may switch the model while this waits
            state = self.state
            await state.wait()
        if self._engine is None:
            raise NotLoaded("no model is loaded", "Choose one with /models.")
        return self._engine

    def fetching(self) -> Running | None:
        """Return the download that the starting engine runs, or None. Reads files."""
        process = None if self.is_paused else self._process
        running = None if process is None else running_download(self._settings.models_dir)
        return running if process and running and running.pid == process.pid else None

    def pause(self) -> None:
        """Pause loading. A partial download is kept, and callers that wait for the model keep waiting."""
        if self.state.is_over or self.is_paused:
            return
        self.is_paused = True
        self._cancel()
        self._task = asyncio.create_task(self._pause(self.state))

    async def _pause(self, state: LoadingState) -> None:
        done = state.now.fraction
        await self._release_engine(state)
        state.update(state.model, "paused" if done is None else f"paused at {done:.0%}")

    def resume(self) -> None:
        """Resume a paused load, or retry one that failed."""
        if self.state.problem is not None:
            self._start_target(self._target)
        elif self.is_paused:
            self._cancel()
            self._start_loading()

    async def loading(self, *, retry: bool = False) -> AsyncGenerator[Loading, None]:
        """Yield the progress of loading. If the model fails to load, yield the progress of reloading the previous one.

        Raises ClientError at the end if the requested model could not be loaded.
        """
        if retry:
            self.resume()
        requested = self.state
        try:
            async for now in requested.states():
                yield now
            return
        except ClientError as problem:
            before = self.state
            if before is requested:
                raise
            reason = problem
        try:
            async for now in before.states():
                yield now
        except ClientError as problem:
            both = f"{reason.message}; {before.model} could not be loaded again: {problem.message}"
            raise ClientError(both, problem.remedy) from reason
        remedy = f"{reason.remedy.rstrip('.')}. " if reason.remedy else ""
        raise ClientError(reason.message, f"{remedy}{before.model} is loaded again.")

    def switch(self, model: str) -> LoadingState:
        """Start loading another model for later replies, and return its loading state. Replies in progress are not
        affected.
        """
        if model != self._target.model or self.state.is_over or self.is_paused:
            self._previous = self._target
            self._switch_to(_TargetModel(model, is_required=True))
        return self.state

    def cancel_switch(self, requested: LoadingState) -> None:
        """Cancel the load `requested` and return to the previous model. A partial download is kept."""
        if requested.is_over or requested is not self.state:
            return
        before = self._served or self._previous
        if before is None or before.model == requested.model:
            self.pause()
        else:
            self._switch_to(before)

    def _switch_to(self, target: _TargetModel) -> None:
        self._cancel()
        self.state.finish()
        self._start_target(target)

    def _start_target(self, target: _TargetModel) -> None:
        self._target = target
        self.state = self._state_of(target)
        self._start_loading()

    def _state_of(self, target: _TargetModel) -> LoadingState:
        """Return the initial state of a load. If the user chose no model, the state of a remote load names the
        endpoint, because its model is unknown until it answers.
        """
        if self._remote:
            return LoadingState(target.model if target.is_required else self._remote, "connecting")
        return LoadingState(target.model, "starting")

    def _start_loading(self) -> None:
        self.is_paused = False
        self._task = asyncio.create_task(self._load(self._target))

    def _cancel(self) -> None:
        """Cancel the loading task. The caller decides in which state the load ends."""
        if self._task is not None:
            self._task.cancel()

    async def _load(self, target: _TargetModel) -> None:
        state = self.state
        try:
            with client_errors():
                if self._engine is None or not await self._answers(target.model):
                    await self._release_engine(state)
                    find = self._attach_remote(target, state) if self._remote else self._find_or_start(target, state)
                    self._engine = await find
        except ClientError as problem:
            if self._served is not None and self._served != target:
                self._start_target(self._served)
            state.finish(problem)
        except Exception:  # a bug: without this handler, callers of `use` would wait forever
            state.finish(ClientError("the engine could not be started", "Run ingle doctor, and report its output."))
            raise
        else:
            self._served = _TargetModel(self._engine.model, is_required=True) if self._remote else target
            state.succeed(self._engine.model, self._warning(self._engine))

    def _warning(self, engine: ReadyEngine) -> str:
        """Return a warning if the engine's context is shorter than the user asked for, or ""."""
        held = engine.context_length
        if self._remote or held is None or held >= self._settings.context:
            return ""
        holder = "the model" if self._process is not None else "the running server"
        return f"{holder} supports {held:,} tokens: {self._settings.stated('context')} is lowered to that"

    def _is_lost(self) -> bool:
        """Whether the server in use has exited."""
        if self._process is not None and self._process.has_ended:  # its record may still exist
            return True
        return self._instance is not None and self._instance not in running_instances(self._settings)

    async def _answers(self, model: str) -> bool:
        """Whether the engine in use still runs and has loaded `model`."""
        if self._remote:
            return self.model == model
        found = await asyncio.to_thread(find_instance, replaced(self._settings, model=model))
        return found is not None and found == self._instance

    async def _release_engine(self, state: LoadingState) -> None:
        """Release the current engine once no caller uses it. Stop its process if only this chat needs it."""
        while self._uses:
            state.update(state.model, describe_wait(self._reply_titles))
            self._unused.clear()
            await self._unused.wait()
        previous, self._engine, self._instance = self._engine, None, None
        if previous is not None:
            await previous.endpoint.close()
        if (process := self._process) is not None:
            is_shared = await asyncio.to_thread(self._is_shared, process)
            self._process = None
            if not is_shared:
                await asyncio.shield(process.stop())  # the process must be stopped even if this task is cancelled
        self._leases.close()

    async def _attach_remote(self, target: _TargetModel, state: LoadingState) -> ReadyEngine:
        from app.chat_backend.endpoint import ChatEndpoint

        endpoint = ChatEndpoint(self._remote, self._key, is_inglenook=False)
        async with AsyncExitStack() as unless_used:
            unless_used.push_async_callback(endpoint.close)
            names = await _wait_for_names(endpoint, state)
            requested = target.model if target.is_required else ""
            found = (
                next((one for one in names if one.name == requested), None) if requested else next(iter(names), None)
            )
            if found is None:
                there = ", ".join(one.name for one in names[:8])
                raise AppError(
                    f"{self._remote} has no model {requested}".rstrip(), f"Available: {there}." if there else ""
                )
            unless_used.pop_all()
            # Only the parameters that the server reports are sent, because it may reject others.
            return ReadyEngine(endpoint, found.name, found.context_length, found.sampling or {})

    async def _find_or_start(self, target: _TargetModel, state: LoadingState) -> ReadyEngine:
        """Attach to a running engine or start one. A lock ensures that only one chat starts it; the others wait and
        attach.
        """
        from filelock import FileLock, Timeout

        settings = replaced(self._settings, model=target.model)
        lock = FileLock(self._settings.state_dir / "engine.lock", mode=0o600, thread_local=False)
        while True:
            for instance in await asyncio.to_thread(self._running, settings, target):
                with suppress(InglenookError):  # the server only computes embeddings, or is exiting
                    return await self._attach(instance)
            try:
                private_folder(self._settings.state_dir)
                lock.acquire(timeout=0)
                break
            except Timeout:
                state.update(target.model, "another window is loading it")
                await asyncio.sleep(_TURN_SECONDS)
        try:
            return await self._start_process(settings, state)
        finally:
            lock.release()

    def _running(self, settings: Settings, target: _TargetModel) -> Sequence[Instance]:
        """Return the running server of the model. If any model is acceptable, return all servers, that one first."""
        found = find_instance(settings)
        others = [] if target.is_required else [one for one in running_instances(settings) if one != found]
        return [*([found] if found else []), *others]

    async def _start_process(self, settings: Settings, state: LoadingState) -> ReadyEngine:
        rate = DownloadRate()

        def on_message(message: ChildMessage) -> None:
            if message.stage:
                state.update(settings.model, *describe_stage(message, rate))
            elif message.note:
                state.update(settings.model, message.note)

        state.update(settings.model, "Starting")
        process = EngineProcess.start(settings, _absolute(settings.model), self._flags)
        self._process = process
        self._leases.enter_context(hold_lease(settings, process.pid))
        instance = await process.wait_until_serving(on_message)
        return await self._attach(instance)

    async def _attach(self, instance: Instance) -> ReadyEngine:
        """Connect to a running server. Raises ServerUnreachable or ServerError if it cannot generate replies."""
        from app.chat_backend.endpoint import ChatEndpoint

        endpoint = ChatEndpoint(instance.api_url, own_key(self._settings), is_inglenook=True)
        async with AsyncExitStack() as unless_used:
            unless_used.push_async_callback(endpoint.close)
            report = await _wait_for_report(endpoint)
            if self._process is None:
                self._leases.enter_context(hold_lease(self._settings, instance.pid))
            self._instance = instance
            names = await endpoint.names()
            default_sampling = next(
                (one.sampling for one in names if one.name == instance.model and one.sampling), None
            )
            if default_sampling is None:
                from app.models.sampling_defaults import sampling_from_files

                default_sampling = await asyncio.to_thread(sampling_from_files, instance)
            unless_used.pop_all()
            return ReadyEngine(endpoint, instance.model, int(report["context_length"]), default_sampling)


async def _wait_for_names(endpoint: "ChatEndpoint", state: LoadingState) -> Sequence["ServedName"]:
    """Return the models of a remote server. Waits while it loads its model, for at most _LOAD_SECONDS."""
    from app.client.http import ServerLoading, ServerSilent

    patience = asyncio.get_running_loop().time() + _LOAD_SECONDS
    while True:
        try:
            return await endpoint.names()
        except (ServerLoading, ServerSilent):
            if asyncio.get_running_loop().time() > patience:
                raise
            state.update(state.model, "the server does not answer yet; it may be loading its model")
            await asyncio.sleep(_TURN_SECONDS)


async def _wait_for_report(endpoint: "ChatEndpoint") -> Any:
    """Return the engine's status report. Retries, because a server is registered shortly before it answers."""
    from app.client.http import ServerUnreachable

    patience = asyncio.get_running_loop().time() + _WAKE_SECONDS
    while True:
        try:
            return await endpoint.call_inglenook("GET", "engine")
        except ServerUnreachable:
            if asyncio.get_running_loop().time() > patience:
                raise
            await asyncio.sleep(_TURN_SECONDS)


def describe_wait(titles: Sequence[str]) -> str:
    """Describe which replies must end before the model can be replaced, and how to stop them."""
    if not titles:
        return "waiting for another request to finish"
    more = f" and {len(titles) - 1} more" if len(titles) > 1 else ""
    return f"waiting for the reply in “{titles[0]}”{more} to finish (Esc in that chat stops it)"


def _absolute(model: str) -> str:
    """Return an absolute path if `model` is an existing path; otherwise return `model` unchanged."""
    path = Path(model).expanduser()
    return str(path.absolute()) if path.exists() else model
