"""The server that the chat uses: finds a running one, starts a process, or connects to a remote endpoint.

The HTTP client is imported only when a server is contacted, so that the chat starts fast.
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, aclosing, suppress
from dataclasses import dataclass, field
from dataclasses import replace as replaced
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from app.chat_backend.client_errors import client_errors
from app.chat_backend.engine.child import ChildMessage
from app.chat_backend.engine.loading_state import DownloadRate, LoadingState, describe_stage
from app.chat_backend.engine.process import EngineProcess, absolute, find_or_start
from app.client.running_server import FoundServer, find_servers
from app.errors import AppError
from app.models.transfer.download_turn import Running, running_download
from app.process.engine_lease import count_other_leases, hold_lease
from app.process.instance import BoxInstance, Instance, running_instances
from app.settings.api_keys import own_key
from app.settings.boxes import Box, find_box
from app.settings.settings import Settings
from quant.errors import InglenookError
from tui.plain_text import model_name

if TYPE_CHECKING:
    from app.chat_backend.endpoint import ChatEndpoint, ServedName

_WAKE_SECONDS = 5.0  # maximum time from the registration of a new server to its first answer
_LOAD_SECONDS = 1800.0  # maximum time that a remote server may take to load its model
_EXIT_SECONDS = 3.0  # seconds between two checks whether a server that another program started has exited
_TURN_SECONDS = 0.2  # seconds between two checks whether another chat has started the engine


@dataclass(frozen=True, slots=True)
class ReadyEngine:
    """An engine with a loaded model."""

    endpoint: "ChatEndpoint"
    model: str
    context_length: int | None  # None: unknown
    default_sampling: Mapping[str, float] = field(default_factory=dict)  # the model's recommended sampling
    parameters: int | None = None  # number of weights; None: the server does not report it

    async def report(self) -> Any:
        """Return the report of an ingle server about this model. Raises ServerUnreachable or ServerError."""
        return await self.endpoint.call_inglenook("GET", f"engine?model={quote(self.model, safe='')}")


@dataclass(frozen=True, slots=True)
class TargetModel:
    """The model to load."""

    model: str
    is_required: bool  # True: only this model is acceptable; False: any loaded model is
    # in tokens; servers of the user with a shorter context are not used, but engines of other chats are
    least_context: int = 0

    def accepts(self, instance: Instance) -> bool:
        """Whether the context of a running server is long enough."""
        held = instance.context_length
        return instance.kind == "chat" or held is None or held >= self.least_context


class EngineServer:
    """At most one server at a time: `connect`, then `change` for other models, then `release`."""

    def __init__(
        self, settings: Settings, flags: Mapping[str, object], endpoint: str = "", key: str | None = None
    ) -> None:
        """Store the configuration.

        `flags` are the settings from the command line and `stay`; an engine process is started with them. `endpoint` is
        the base URL of another server, and `key` is its API key.
        """
        self._settings = settings
        self._flags = flags
        self.remote = endpoint
        self._key = key
        self._process: EngineProcess | None = None
        self._leases = ExitStack()  # while this process holds a lease, the engine keeps running
        self._instance: Instance | None = None  # registry entry of the server in use
        self._is_downloading = False

    async def connect(self, target: TargetModel, state: LoadingState) -> ReadyEngine:
        """Find or start a server of the target, and wait until it is loaded. Raises InglenookError or ClientError."""
        if self.remote:
            return await self._attach_remote(target, state)
        if (box := self.box_of(target.model)) is not None:
            return await self._attach(FoundServer(BoxInstance.of(box, target.model), target.model), state)
        return await self._find_or_start(target, state)

    def box_of(self, model: str) -> Box | None:
        """Return the box that has a model; None if it is one of this machine. Reads a file."""
        return find_box(model, self._settings.state_dir)

    async def change(self, engine: ReadyEngine, target: TargetModel, state: LoadingState) -> ReadyEngine | None:
        """Load the model of the target in the server in use, which keeps the model of `engine` while memory allows.

        Returns None if the server cannot load this model. A model that is not on this machine is downloaded first.
        Raises InglenookError or ClientError.
        """
        if self._instance is None or not await asyncio.to_thread(self.can_load, target.model):
            return None
        name = await asyncio.to_thread(self._name_here, target.model)
        if name is None:
            await self._download(target.model, state)
            name = await asyncio.to_thread(self._name_here, target.model)
        return None if name is None else await self._loaded(engine.endpoint, FoundServer(self._instance, name), state)

    def can_load(self, model: str) -> bool:
        """Whether the server in use still runs, and can load a model beside others. Reads files.

        A server cannot if it is remote or of an earlier version, or if the model is a file without a name or of a box.
        """
        from app.models.store import ModelStore

        if self._instance is None or not self._instance.serves_all or self.is_lost() or self.box_of(model):
            return False
        return self._name_here(model) is not None or ModelStore(self._settings).known_name(model) is not None

    def _name_here(self, model: str) -> str | None:
        """Return the name by which the server in use knows a model; None if it does not know it, or has exited."""
        found = find_servers(replaced(self._settings, model=model))
        return next((one.model for one in found if one.instance == self._instance), None)

    async def _download(self, model: str, state: LoadingState) -> None:
        """Download a model, and show the progress. A partial download is kept."""
        from app.models.pulls import Pulls

        pulls, rate = Pulls(self._settings), DownloadRate()
        self._is_downloading = True
        try:
            async with aclosing(pulls.pull(model)) as events:
                async for now in events:
                    stage = now.label or now.state.value
                    state.show(describe_stage(model, stage, now.done, now.total, "bytes", rate))
        finally:
            self._is_downloading = False
            await pulls.close()

    async def release(self) -> None:
        """Leave the server. Stop its process if only this chat needs it."""
        self._instance = None
        if (process := self._process) is not None:
            is_exclusive = await asyncio.to_thread(self.is_exclusive)
            self._process = None
            if is_exclusive:
                await asyncio.shield(process.stop())  # the process must be stopped even if this task is cancelled
        self._leases.close()

    async def close(self, *, is_loaded: bool) -> None:
        """Leave the server. A process exits when no client needs it; one that is still loading is stopped."""
        if self._process is not None and not is_loaded:  # no client can use it yet
            await self._process.stop()
        self._leases.close()

    @property
    def is_started_here(self) -> bool:
        """Whether this chat started the server."""
        return self._process is not None

    def is_exclusive(self) -> bool:
        """Whether this chat started the server, and no other program uses it. Reads files."""
        process = self._process
        return process is not None and count_other_leases(self._settings, process.pid) == 0

    def is_lost(self) -> bool:
        """Whether the server in use has exited. Reads files."""
        if self._process is not None and self._process.has_ended:  # its record may still exist
            return True
        return self._instance is not None and self._instance not in running_instances(self._settings)

    async def wait_until_lost(self) -> None:
        """Wait until the server in use has exited. A process that another program started has to be polled for it."""
        if self._process is not None:
            await self._process.wait_until_exit()
        while not await asyncio.to_thread(self.is_lost):
            await asyncio.sleep(_EXIT_SECONDS)

    def serves(self, target: TargetModel, engine: ReadyEngine) -> bool:
        """Whether the server in use still runs, and `engine` has a model that the target accepts. Reads files."""
        return not self.is_lost() and (not target.is_required or self._name_here(target.model) == engine.model)

    def fetching(self) -> Running | None:
        """Return the download that the starting process or this process runs, or None. Reads files."""
        pid = os.getpid() if self._is_downloading else self._process.pid if self._process is not None else None
        running = None if pid is None else running_download(self._settings.models_dir)
        return running if running is not None and running.pid == pid else None

    async def offered_models(self) -> "Sequence[ServedName]":
        """Return the models of the remote endpoint. Raises ClientError."""
        from app.chat_backend.endpoint import ChatEndpoint

        with client_errors():
            endpoint = ChatEndpoint(self.remote, self._key, is_inglenook=False)
            try:
                return await endpoint.names()
            finally:
                await endpoint.close()

    async def _attach_remote(self, target: TargetModel, state: LoadingState) -> ReadyEngine:
        from app.chat_backend.endpoint import ChatEndpoint

        endpoint = ChatEndpoint(self.remote, self._key, is_inglenook=False)
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
                    f"{self.remote} has no model {requested}".rstrip(), f"Available: {there}." if there else ""
                )
            unless_used.pop_all()
            # Only the parameters that the server reports are sent, because it may reject others.
            return ReadyEngine(endpoint, found.name, found.context_length, found.sampling or {}, found.parameters)

    async def _find_or_start(self, target: TargetModel, state: LoadingState) -> ReadyEngine:
        """Attach to a running engine or start one."""
        settings = replaced(self._settings, model=target.model)

        async def find() -> ReadyEngine | None:
            for found in await asyncio.to_thread(self._running, settings, target):
                with suppress(InglenookError):  # the server only computes embeddings, or is exiting
                    return await self._attach(found, state)
            return None

        return await find_or_start(
            settings,
            find,
            lambda: self._start_process(settings, state),
            lambda other: state.update(*_describe_other_load(target, other)),
        )

    def is_running_elsewhere(self, target: TargetModel) -> bool:
        """Whether another server than the one in use can answer. Reads files."""
        running = self._running(replaced(self._settings, model=target.model), target)
        return any(found.instance != self._instance for found in running)

    def _running(self, settings: Settings, target: TargetModel) -> Sequence[FoundServer]:
        """Return the running servers that the target accepts, first those of its model."""
        found = find_servers(settings)
        if not target.is_required:
            own = [one.instance for one in found]
            found += [FoundServer(one, one.model) for one in running_instances(settings) if one not in own]
        return [one for one in found if target.accepts(one.instance)]

    async def _start_process(self, settings: Settings, state: LoadingState) -> ReadyEngine:
        from app.models.store import ModelStore

        # the engine process finds a wrong name as well, but only after its imports
        await asyncio.to_thread(lambda: ModelStore(settings).check_name(settings.model))
        model, rate = absolute(settings.model), DownloadRate()

        def on_message(message: ChildMessage) -> None:
            if message.stage:
                state.show(describe_stage(model, message.stage, message.done, message.total, message.unit, rate))
            elif message.note:
                state.update(model, message.note)

        state.update(model, "Starting")
        process = EngineProcess.start(settings, model, self._flags)
        self._process = process
        self._leases.enter_context(hold_lease(settings, process.pid))
        instance = await process.wait_until_serving(on_message)
        return await self._attach(FoundServer(instance, instance.model), state)

    async def _attach(self, found: FoundServer, state: LoadingState) -> ReadyEngine:
        """Connect to a running server, which loads the model if necessary.

        Raises ServerUnreachable or ServerError if it cannot generate replies.
        """
        from app.chat_backend.endpoint import ChatEndpoint

        endpoint = ChatEndpoint(found.instance.api_url, own_key(self._settings), is_inglenook=True, box=found.box)
        async with AsyncExitStack() as unless_used:
            unless_used.push_async_callback(endpoint.close)
            if found.box is None:
                await _wait_until_answering(endpoint)
            engine = await self._loaded(endpoint, found, state)
            if found.box is None:
                if self._process is None:
                    self._leases.enter_context(hold_lease(self._settings, found.instance.pid))
                self._instance = found.instance
            unless_used.pop_all()
            return engine

    async def _loaded(self, endpoint: "ChatEndpoint", found: FoundServer, state: LoadingState) -> ReadyEngine:
        """Load a model in a running server, and describe it. Raises ServerError if it cannot generate replies."""
        rate = DownloadRate()
        if found.instance.serves_all:
            async with aclosing(endpoint.load(found.model)) as lines:
                async for line in lines:
                    if line.stage:
                        state.show(describe_stage(found.model, line.stage, line.done, line.total, line.unit, rate))
        served = await endpoint.describe(found.model)
        engine = ReadyEngine(endpoint, found.model, None, served.sampling or {}, served.parameters)
        report = await engine.report()
        if not report["tiers"]:
            raise AppError(f"{model_name(found.model)} generates no text", "Choose a chat model.")
        if not engine.default_sampling and found.box is None:
            from app.models.sampling_defaults import sampling_from_files

            engine = replaced(engine, default_sampling=await asyncio.to_thread(sampling_from_files, found.instance))
        return replaced(engine, context_length=int(report["context_length"]))


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


async def _wait_until_answering(endpoint: "ChatEndpoint") -> None:
    """Wait until a server answers, which is shortly after it is registered."""
    from app.client.http import ServerUnreachable

    patience = asyncio.get_running_loop().time() + _WAKE_SECONDS
    while True:
        try:
            await endpoint.call_inglenook("GET", "engine")
        except ServerUnreachable:
            if asyncio.get_running_loop().time() > patience:
                raise
            await asyncio.sleep(_TURN_SECONDS)
        else:
            return


def _describe_other_load(target: TargetModel, other: str) -> tuple[str, str]:
    """Return the model to show while another process loads the model `other`, and the stage of its load."""
    own = absolute(target.model)
    if target.is_required and other != own:
        return own, f"waiting until another window has loaded {model_name(other)}"
    return other, "another window is loading it"
