"""The engine that the chat uses: waiting for it, and switching, pausing, and retrying of its model.

Loading runs in the background; callers that need the model wait for it with `use`. The server in use loads another
model beside the previous one, which replies in progress keep using. A server that cannot load it is replaced when no
caller uses it. If a model cannot be loaded, the previous one is used again. If the engine process has died, the next
call of `use` restarts it, or connects to a server whose context is at least as long.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from app.chat_backend.client_errors import client_errors, to_thread
from app.chat_backend.engine.loading_state import LoadingState
from app.chat_backend.engine.server import EngineServer, ReadyEngine, TargetModel
from app.models.transfer.download_turn import Running
from app.settings.settings import Settings
from quant.errors import InglenookError
from tui.client import ClientError, NotLoaded
from tui.engine_types import Loading
from tui.figures import share
from tui.plain_text import model_name

SHORT_CONTEXT = 4096  # tokens; a running server with a shorter context is named, even if the user asked for none

if TYPE_CHECKING:
    from app.chat_backend.endpoint import ServedName


class EngineConnection:
    """Finds or starts the engine, and replaces it when the user switches the model.

    Used on one event loop. Call `start` first and `close` at the end.
    """

    def __init__(self, settings: Settings, server: EngineServer) -> None:
        """Store the configuration. `start` finds or starts the engine, which `server` connects to."""
        self._settings = settings
        self._server = server
        self._engine: ReadyEngine | None = None
        self._task: asyncio.Task[None] | None = None
        self._target = TargetModel(settings.model, settings.origins["model"] != "default")
        self._served: TargetModel | None = None  # the target that was loaded last
        self._previous: TargetModel | None = None  # the target before the last switch
        self._uses = 0
        self._reply_titles: list[str] = []  # titles of the chats whose replies use the engine
        self._unused = asyncio.Event()
        self.is_paused = False  # whether loading is paused until `resume`
        self.state = self._state_of(self._target)
        self._replaced = asyncio.Event()  # set when `state` is replaced by the state of another load
        self._restart: LoadingState | None = None  # the state of the last restart

    def start(self) -> None:
        """Start to find or launch the engine in the background."""
        self._task = asyncio.create_task(self._load(self._target))

    async def close(self) -> None:
        """Release the engine. It exits when no other client needs it."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        if self._engine is not None:
            await self._engine.endpoint.close()
        await self._server.close(is_loaded=self._engine is not None)

    @property
    def endpoint(self) -> str:
        """The address of the remote endpoint that the user named, or ""."""
        return self._server.remote

    @property
    def is_remote(self) -> bool:
        """Whether the user named a remote endpoint."""
        return bool(self.endpoint)

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
        is_loading = self._task is not None and not self.state.is_over and not self.is_remote
        return self._target.model if is_loading and self._server.box_of(self._target.model) is None else ""

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
        return await self._server.offered_models()

    async def reclaimable_memory(self) -> int:
        """Return the bytes available to another model once this engine is unloaded.

        Returns 0 if unloading frees nothing, because the engine is not loaded or other programs use it.
        """
        engine = self._engine
        if engine is None or not await asyncio.to_thread(self._server.is_exclusive):
            return 0
        with suppress(InglenookError):  # the engine may be exiting
            return int((await engine.report())["room"])
        return 0

    async def decode_rate(self) -> float:
        """Return the weight bytes per second that the loaded engine has measured; 0 if it is unknown."""
        engine = self._engine
        if engine is not None and engine.endpoint.is_on_this_machine:
            with suppress(InglenookError):  # the engine may be exiting
                return float((await engine.report()).get("decode_rate", 0.0))
        return 0.0

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
        return self.state.is_over and await asyncio.to_thread(self._server.is_lost)

    async def wait_until_lost(self) -> None:
        """Wait until the server in use has exited. Call it inside `use`, so that the server is not replaced."""
        await self._server.wait_until_lost()

    async def is_ready(self) -> bool:
        """Whether the loaded model can answer now, without waiting for a load or a restart."""
        return self.state.is_over and self._engine is not None and not await self.is_lost()

    async def is_started_elsewhere(self) -> bool:
        """Whether the server in use has exited, and another program has started one that can answer."""
        return await self.is_lost() and await to_thread(self._server.is_running_elsewhere, self._target)

    async def loaded_models(self) -> AsyncGenerator[Loading, None]:
        """Yield the last state of each successful load, and one without a model when its engine has exited.

        Never ends.
        """
        while True:
            state, replaced = self.state, self._replaced
            with suppress(NotLoaded):  # `loading` raises the reason
                await state.wait()
                yield state.now
                await _first_of(self._server.wait_until_lost(), replaced.wait())
                if await self.is_lost():
                    yield Loading("", "stopped")
            await replaced.wait()

    @property
    def is_restarting(self) -> bool:
        """Whether the engine is starting again after it exited."""
        return self._restart is self.state and not self.state.is_over

    async def _restart_if_lost(self) -> None:
        if await self.is_lost():
            self._start_target(self._target)
            self._restart = self.state

    async def _ready(self, retry: bool) -> ReadyEngine:
        if retry:
            self.resume()
        await self._restart_if_lost()
        state = None
        while state is not self.state:  # the user may switch the model while this waits
            state = self.state
            await state.wait()
        if self._engine is None:
            raise NotLoaded("no model is loaded", "Choose one with /models.")
        return self._engine

    def fetching(self) -> Running | None:
        """Return the download that the starting engine runs, or None. Reads files."""
        return None if self.is_paused else self._server.fetching()

    def pause(self) -> None:
        """Pause loading. A partial download is kept, and callers that wait for the model keep waiting."""
        if self.state.is_over or self.is_paused:
            return
        self.is_paused = True
        self._cancel()
        self._task = asyncio.create_task(self._pause(self.state))

    async def _pause(self, state: LoadingState) -> None:
        done = state.now.fraction
        if self._engine is None:
            await self._release_engine(state)
        state.update(state.model, "paused" if done is None else f"paused at {share(done)}")

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
            await self._restart_if_lost()
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
            both = f"{reason.message}; {model_name(before.model)} could not be loaded again: {problem.message}"
            raise ClientError(both, problem.remedy) from reason
        remedy = f"{reason.remedy.rstrip('.')}. " if reason.remedy else ""
        raise ClientError(reason.message, f"{remedy}{model_name(before.now.model)} is loaded again.")

    async def waits_for_replies(self, model: str) -> bool:
        """Whether `switch` to this model waits for replies in progress, because the server in use cannot load it."""
        return not await to_thread(self._server.can_load, model)

    def switch(self, model: str) -> LoadingState:
        """Start loading another model for later replies, and return its loading state. Replies in progress are not
        affected.
        """
        if model != self._target.model or self.state.is_over or self.is_paused:
            self._previous = self._target
            self._switch_to(TargetModel(model, is_required=True))
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

    def _switch_to(self, target: TargetModel) -> None:
        self._cancel()
        self.state.finish()
        self._start_target(target)

    def _start_target(self, target: TargetModel) -> None:
        self._target = target
        self.state = self._state_of(target)
        replaced, self._replaced = self._replaced, asyncio.Event()
        replaced.set()
        self._start_loading()

    def _state_of(self, target: TargetModel) -> LoadingState:
        """Return the initial state of a load. If the user chose no model, the state of a remote load names the
        endpoint, because its model is unknown until it answers.
        """
        if self.is_remote:
            return LoadingState(target.model if target.is_required else self._server.remote, "connecting")
        return LoadingState(target.model, "starting")

    def _start_loading(self) -> None:
        self.is_paused = False
        self._task = asyncio.create_task(self._load(self._target))

    def _cancel(self) -> None:
        """Cancel the loading task. The caller decides in which state the load ends."""
        if self._task is not None:
            self._task.cancel()

    async def _load(self, target: TargetModel) -> None:
        state = self.state
        try:
            with client_errors():
                if self._engine is None or not await self._answers(target, self._engine):
                    self._engine = await self._changed(target, state)
        except ClientError as problem:
            if self._served is not None and self._served != target:
                self._start_target(self._served)
            state.finish(problem)
        except Exception:  # a bug: without this handler, callers of `use` would wait forever
            state.finish(ClientError("the engine could not be started", "Run ingle doctor, and report its output."))
            raise
        else:
            self._served = self._target_after(target, self._engine)
            if self._target == target and not self.is_remote:
                self._target = self._served
            state.succeed(self._engine.model, self._warning(self._engine, target))

    def _target_after(self, target: TargetModel, engine: ReadyEngine) -> TargetModel:
        """Return the target of later restarts of a loaded engine."""
        if self.is_remote:
            return TargetModel(engine.model, is_required=True)
        return replace(target, least_context=engine.context_length or 0)

    def _warning(self, engine: ReadyEngine, target: TargetModel) -> str:
        """Return a warning if the engine has another context length than the user asked for, or a context that
        another program chose and that is short, or shorter than before; or "".
        """
        held, asked = engine.context_length, self._settings.context
        if not engine.endpoint.is_on_this_machine or held is None or asked == held:
            return ""
        stated = self._settings.stated("context")
        if self._server.is_started_here:
            return f"the model supports {held:,} tokens: {stated} is lowered to that" if held < asked else ""
        found = f"this server's context is {held:,} tokens. Run ingle stop"
        if asked:
            return f"{found} to use {stated}."
        return f"{found} to use a longer one." if held < max(SHORT_CONTEXT, target.least_context) else ""

    async def _answers(self, target: TargetModel, engine: ReadyEngine) -> bool:
        """Whether the engine in use still runs and has a model that the target accepts."""
        if self.is_remote:
            return engine.model == target.model
        return await asyncio.to_thread(self._server.serves, target, engine)

    async def _changed(self, target: TargetModel, state: LoadingState) -> ReadyEngine:
        """Load the target in the server in use if that can load it; otherwise leave this server for another one."""
        engine = self._engine
        if engine is not None and (other := await self._server.change(engine, target, state)) is not None:
            return other
        await self._release_engine(state)
        return await self._server.connect(target, state)

    async def _release_engine(self, state: LoadingState) -> None:
        """Release the current engine once no caller uses it. Stop its process if only this chat needs it."""
        while self._uses:
            state.update(state.model, describe_wait(self._reply_titles))
            self._unused.clear()
            await self._unused.wait()
        previous, self._engine = self._engine, None
        if previous is not None:
            await previous.endpoint.close()
        await self._server.release()


async def _first_of(*events: Coroutine[Any, Any, object]) -> None:
    """Wait until one of the coroutines ends, and cancel the others."""
    tasks = [asyncio.ensure_future(event) for event in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def describe_wait(titles: Sequence[str]) -> str:
    """Describe which replies must end before the model can be replaced, and how to stop them."""
    if not titles:
        return "waiting for another request to finish"
    more = f" and {len(titles) - 1} more" if len(titles) > 1 else ""
    return f"waiting for the reply in “{titles[0]}”{more} to finish (esc in that chat stops it)"
