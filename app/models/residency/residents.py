"""Residents: the loaded models of one server, loaded when a request needs them, and unloaded when memory is needed.

Everything here runs on one event loop; a `Loader` does the slow work on threads. One model loads at a time, in the
order of the classes of the requests that wait, then of their arrival. Requests for the same model wait for one load.

Before a load, `Room` frees the memory that it needs.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Generic

from app.models.residency.load_failures import OUT_OF_MEMORY, MemoryTaken, pause_after, problem_of, with_numbers
from app.models.residency.memory import ResidentMemory
from app.models.residency.resident import (
    SHORTEST_TURN,
    LoadedT,
    Loader,
    LoadTask,
    ModelBusy,
    Policy,
    Reason,
    Resident,
    State,
    Waiter,
)
from app.models.residency.resident_set import CLOSING, POLL_SECONDS, ResidentSet
from app.models.residency.room import Room
from app.models.residency.switch_advice import SwitchAdvice
from app.models.residency.unloading import Unloading
from engine.errors import EngineError, LoadStopped, OutOfMemory
from engine.freed_memory import release_frames
from engine.request import ServiceClass

log = logging.getLogger(__name__)

MAX_RESTARTS, RESTART_SECONDS = 3, 600.0  # how often a model whose engine failed is loaded again in this time
KEEP_LOADING = 0.5  # a load without waiting requests continues if more than this share is done


class Residents(Generic[LoadedT]):
    """All models of one server that have been requested at least once."""

    def __init__(
        self,
        loader: Loader[LoadedT],
        policy: Callable[[str], Policy] = Policy,
        limits: Mapping[str, int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create it without any model.

        `policy` returns the policy of the model with a name. `limits`: bytes of each memory that all models may use
        together.
        """
        self._loader = loader
        self._clock = clock
        self._load: asyncio.Task[None] | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._models = ResidentSet[LoadedT](policy, clock)
        self.memory = ResidentMemory(loader, self._models, limits or {})
        self.advice = SwitchAdvice(loader, self.memory, self._models)
        self._unloading = Unloading(self._models, self.memory, self._notify)
        self._room = Room(loader, self._models, self.memory, self._unloading, self.advice)

    def __iter__(self) -> Iterator[Resident[LoadedT]]:
        return iter(self._models)

    def of(self, name: str) -> Resident[LoadedT]:
        """Return the model with this name, loaded or not."""
        return self._models.of(name)

    @property
    def is_closed(self) -> bool:
        """Whether the server is shutting down."""
        return self._models.is_closed

    def adopt(self, name: str, loaded: LoadedT) -> Resident[LoadedT]:
        """Add a model that is loaded already."""
        model = self.of(name)
        model.loaded, model.state = loaded, State.LOADED
        model.loaded_at = model.last_used = self._clock()
        model.parked = None
        if model.suspended is not None:
            loaded.resume(model.suspended)
            model.suspended = None
        return model

    @property
    def failure(self) -> str:
        """The failure of an engine after which the process must start again; empty if there is none."""
        loaded = (model.loaded for model in self if model.loaded is not None)
        return next((it.failure for it in loaded if it.needs_restart and it.failure), "")

    def seconds_left(self, model: Resident[LoadedT]) -> float | None:
        """Return the seconds until a model is unloaded if no request uses it; None: it stays loaded."""
        return None if model.expires_at is None else max(0.0, model.expires_at - self._clock())

    def retry_seconds(self, model: Resident[LoadedT]) -> float:
        """Return the seconds until a model that could not be loaded is tried again."""
        return max(0.0, model.retry_at - self._clock())

    @asynccontextmanager
    async def use(
        self,
        name: str,
        service: ServiceClass = ServiceClass.NORMAL,
        *,
        waits: bool = True,
        keep_alive: float | None = None,
    ) -> AsyncIterator[LoadedT]:
        """Keep a model loaded while the body runs. If it is not loaded, load it.

        From now on, the model is unloaded `keep_alive` seconds after its last use, also if the caller is cancelled
        during the load; below 0: when its memory is needed; None: as before.

        Raises the errors of its load, and EngineError if the server stops. Without `waits`, raises ModelBusy instead of
        waiting; the load starts nevertheless.
        """
        model = self.of(name)
        self._check(model)
        if keep_alive is not None:
            model.keep_alive = None if keep_alive < 0 else keep_alive
        if model.admits(self._clock()):
            model.uses[service] += 1
        else:
            await self._wait(model, service, waits=waits)
        loaded = model.loaded
        if loaded is None:
            raise RuntimeError(f"{name} was granted without being loaded")
        try:
            yield loaded
        finally:
            model.uses[service] -= 1
            if service is not ServiceClass.BACKGROUND:
                model.last_urgent = self._clock()
            self._on_release(model)

    def _on_release(self, model: Resident[LoadedT]) -> None:
        """Decide again after a request has left a model, and once its engine has ended requests without a client."""
        model.last_used = self._clock()
        self._check_engine(model)
        if model.suspended is not None and model.suspended.is_empty:  # all clients have left
            model.suspended = None
            self._cancel_load(model)
        self._notify()
        if not model.uses.total() and model.is_used and not self.is_closed:
            asyncio.get_running_loop().call_later(POLL_SECONDS, self._on_release, model)

    def _check(self, model: Resident[LoadedT]) -> None:
        """Raise the error of a model that failed, unless it may be tried again."""
        if self.is_closed:
            raise EngineError(CLOSING)
        self._check_engine(model)
        if model.problem is not None and self.retry_seconds(model):
            raise model.problem.with_traceback(None)  # otherwise it would keep the frames of all requests

    def _check_engine(self, model: Resident[LoadedT]) -> None:
        """Unload a model whose engine has failed, unless the process has to start again for it."""
        loaded = model.loaded
        if loaded is not None and loaded.failure and not loaded.needs_restart and model.state is State.LOADED:
            self._on_engine_failure(model, loaded.failure)

    async def _wait(self, model: Resident[LoadedT], service: ServiceClass, *, waits: bool) -> None:
        """Wait until the model admits a request of this class, which is then counted in its uses."""
        waiter = Waiter(asyncio.get_running_loop().create_future(), service, self._clock())
        if model.state in (State.UNLOADED, State.FAILED):
            model.state = State.WAITING
        model.waiters.append(waiter)
        self._notify()
        if not waits:
            raise self._busy(model, waiter)
        try:
            await waiter.granted
        except asyncio.CancelledError:
            self._leave(model, waiter)
            raise

    def _busy(self, model: Resident[LoadedT], waiter: Waiter) -> ModelBusy:
        """Return the error for a request that does not wait. Its waiter stays, so that the load continues."""
        waiter.granted.add_done_callback(lambda granted: self._leave(model, waiter))
        seconds = max(1.0, self._expected_seconds(model))
        stage = f": {model.task.stage}" if model.task is not None and model.task.stage else ""
        return ModelBusy(f"{model.title} is {model.state.value}{stage}", f"Try again in {seconds:.0f} s.", seconds)

    def _expected_seconds(self, model: Resident[LoadedT]) -> float:
        done = model.task.fraction if model.task is not None else 0.0
        return (model.load_seconds or SHORTEST_TURN) * (1 - done)

    def _leave(self, model: Resident[LoadedT], waiter: Waiter) -> None:
        """Remove a waiter that was cancelled, or does not use what it was granted."""
        granted = waiter.granted
        if waiter in model.waiters:
            model.waiters.remove(waiter)
        elif granted.done() and not granted.cancelled() and granted.exception() is None:
            model.uses[waiter.service] -= 1
        self._cancel_load(model)
        self._notify()

    def _cancel_load(self, model: Resident[LoadedT]) -> None:
        """Stop the load of a model if no request waits for it any more, unless most of it is done."""
        if model.is_wanted:
            return
        if model.task is not None and model.task.fraction <= KEEP_LOADING:
            model.task.is_stopped = True
        if model.state is State.WAITING and model.task is None:
            model.state = State.UNLOADED

    # -- decisions

    def _notify(self) -> None:
        """Decide again after a change: grant requests, and start the next load."""
        self._models.changed.set()
        if self.is_closed:
            return
        for model in self:
            if model.admits(self._clock()):
                model.grant()
        if self._load is None and (waiting := self._next_to_load()) is not None:
            self._load = asyncio.create_task(self._load_model(waiting))
            self._load.add_done_callback(self._on_load_end)
        self._schedule_expiry()

    def _next_to_load(self) -> Resident[LoadedT] | None:
        """Return the model to load next: that of the most urgent request, then of the oldest one."""
        return min(self._models.waiting(), key=lambda model: (model.lets_others_load, model.urgency()), default=None)

    def _on_load_end(self, task: asyncio.Task[None]) -> None:
        self._load = None
        if not task.cancelled() and (error := task.exception()) is not None:  # a bug
            log.error("a load ended unexpectedly", exc_info=error)
        self._notify()

    async def _load_model(self, model: Resident[LoadedT]) -> None:
        """Load a model, after making room for it. Errors go to the requests that wait."""
        model.task = task = LoadTask()
        try:
            if not await self._try_to_load(model, task):
                await self._room.free_all(model)
                await self._load_once(model, task)
        except LoadStopped:
            model.state = State.WAITING if model.is_wanted else State.UNLOADED
        except Exception as error:  # noqa: BLE001 # whatever the files contain: the requests that wait get the error
            self._on_load_failure(model, error)
        finally:
            model.task = None
            if model.parked is not None and not model.parked.num_bytes:  # taken by a load that failed
                model.parked = None
            for other in self:
                other.yields_at = None
                other.lets_others_load = other.lets_others_load and other is model

    async def _try_to_load(self, model: Resident[LoadedT], task: LoadTask) -> bool:
        """Load a model. Returns False if an allocation failed. Raises its other errors."""
        try:
            await self._load_once(model, task)
        except MemoryTaken:
            raise
        except OUT_OF_MEMORY as error:
            task.check()
            release_frames(error)
            log.warning("%s is loaded again after memory is freed: %s", model.title, error)
            return False
        return True

    async def _load_once(self, model: Resident[LoadedT], task: LoadTask) -> None:
        """Load a model, and start it. If this fails, nothing of it stays in memory."""
        needs = await asyncio.to_thread(self._loader.needs, model.name)
        allotted = await self._room.make(model, needs, task)
        model.state, started = State.LOADING, self._clock()
        has_waited_long = model.urgency()[0] is ServiceClass.BACKGROUND and not model.is_patient(self._clock())
        try:
            loaded = await asyncio.to_thread(self._loader.load, model.name, allotted, task, model.parked)
        except OutOfMemory as error:
            raise with_numbers(error, model.title, needs, allotted) from error
        try:
            await loaded.start()
            self.adopt(model.name, loaded)
        except BaseException:
            model.loaded, model.state = None, State.LOADING
            await self._unloading.close(model, loaded)
            raise
        model.loads, model.problem, model.load_seconds = model.loads + 1, None, self._clock() - started
        model.keeps_until = self._clock() + model.turn(model.load_seconds) if has_waited_long else 0.0
        log.info("loaded %s in %.1f s", model.title, model.load_seconds)

    def _on_load_failure(self, model: Resident[LoadedT], error: Exception) -> None:
        release_frames(error)  # the error is kept, and would keep what the load has allocated
        model.failed_loads += 1
        problem = problem_of(error, model.title)
        model.state, model.problem, model.retry_at = State.FAILED, problem, self._clock() + pause_after(problem)
        model.refuse(problem)
        model.end_suspended(problem.message)

    def _on_engine_failure(self, model: Resident[LoadedT], problem: str) -> None:
        """Unload a model whose engine failed, so that it is loaded again. Refuse it if that has happened too often."""
        now = self._clock()
        model.failures.append(now)
        while model.failures and model.failures[0] < now - RESTART_SECONDS:
            model.failures.popleft()
        model.state = State.UNLOADING
        if len(model.failures) > MAX_RESTARTS:
            model.problem = EngineError(f"The engine of {model.title} keeps failing: {problem}", "Restart the server.")
            model.retry_at = now + RESTART_SECONDS
            model.refuse(model.problem)
        self._failing = asyncio.create_task(self._unloading.unload(model, Reason.FAILURE))

    # -- unloading

    async def load(self, name: str, *, pinned: bool | None = None, keep_alive: float | None = None) -> None:
        """Load a model if it is not loaded. `pinned`: see `Resident`; None: unchanged. `keep_alive`: see `use`."""
        async with self.use(name, keep_alive=keep_alive):
            model = self.of(name)
            model.is_pinned = model.is_pinned if pinned is None else pinned

    async def unload(self, name: str) -> bool:
        """Unload a model as soon as no request uses it. Returns whether it was loaded."""
        model = self.of(name)
        if model.task is not None and not model.is_wanted:
            model.task.is_stopped = True
        if model.loaded is None:
            return False
        model.is_pinned = False
        while model.loaded is not None:
            self._models.changed.clear()
            if not model.is_used and model.state is State.LOADED:
                await self._unloading.unload(model, Reason.REQUEST)
                return True
            model.yields_at = self._clock()
            await self._models.changed.wait()
        return True

    def _schedule_expiry(self) -> None:
        """Unload models whose time has passed, and set the timer for the next one."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        now = self._clock()
        idle = [model for model in self if model.state is State.LOADED and not model.is_used]
        times = {model.name: model.expires_at for model in idle if model.expires_at is not None}
        for name, expires_at in times.items():
            if expires_at <= now:
                model = self.of(name)
                model.state = State.UNLOADING
                self._expiring = asyncio.create_task(self._unloading.unload(model, Reason.IDLE))
        later = [expires_at for expires_at in times.values() if expires_at > now]
        if later:
            self._expiry = asyncio.get_running_loop().call_later(min(later) - now, self._notify)

    async def close(self) -> None:
        """Refuse all requests, stop the load, and unload all models."""
        self._models.is_closed = True
        for model in self:
            model.refuse(EngineError(CLOSING))
            model.end_suspended(CLOSING)
            if model.task is not None:
                model.task.is_stopped = True
        self._models.changed.set()
        self.advice.close()
        if self._load is not None:
            await asyncio.wait((self._load,))
        await asyncio.gather(
            *(self._unloading.close(model, model.loaded) for model in self if model.loaded is not None)
        )
