"""Residents: the loaded models of one server, loaded when a request needs them, and unloaded when memory is needed.

Everything here runs on one event loop; a `Loader` does the slow work on threads. One model loads at a time, in the
order of the classes of the requests that wait, then of their arrival. Requests for the same model wait for one load.

A model with running requests is not unloaded, unless all of them run in the background: then they are suspended until
it is loaded again. If another model needs its memory, new requests are admitted for a while, whose length follows the
measured time of a switch; then they wait until the other model has had its turn.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Generic

from app.models.ledger import Blocked, Fits, Never, Unload, Use, Wait
from app.models.load_failures import OUT_OF_MEMORY, MemoryTaken, pause_after, problem_of, refusal, with_numbers
from app.models.resident import (
    SHORTEST_TURN,
    LoadedT,
    Loader,
    LoadTask,
    ModelBusy,
    Needs,
    Policy,
    Reason,
    Resident,
    State,
    Waiter,
)
from app.models.resident_memory import ResidentMemory
from app.models.switch_advice import SwitchAdvice
from app.models.unfreed import unfreed_by
from app.progress import format_bytes
from engine.errors import EngineError, LoadStopped, OutOfMemory
from engine.freed_memory import release_frames, return_freed_memory, trim
from engine.request import ServiceClass
from quant.errors import InglenookError

if TYPE_CHECKING:  # not imported at run time: it imports torch
    from engine.kv.parked_cache import ParkedCache

log = logging.getLogger(__name__)

CLOSING = "The server is shutting down"
PARKING = (Reason.MEMORY, Reason.IDLE)  # reasons for which the cache stays in memory, as long as it fits
MAX_RESTARTS, RESTART_SECONDS = 3, 600.0  # how often a model whose engine failed is loaded again in this time
POLL_SECONDS = 0.25  # seconds between two checks whether the turn of a model has ended
# For background requests, a model is unloaded only if no request of another class has used it for PATIENT_GAP seconds,
# until they have waited for PATIENCE seconds.
PATIENT_GAP, PATIENCE = 30.0, 600.0
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
        self._policy = policy
        self._limits = dict(limits or {})
        self._clock = clock
        self._models: dict[str, Resident[LoadedT]] = {}
        self._load: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._expiry: asyncio.TimerHandle | None = None
        self.memory = ResidentMemory(loader, self._models, self._limits, clock)
        self.advice = SwitchAdvice(loader, self.memory, self._models)
        self.is_closed = False  # whether the server is shutting down

    def __iter__(self) -> Iterator[Resident[LoadedT]]:
        return iter(self._models.values())

    def of(self, name: str) -> Resident[LoadedT]:
        """Return the model with this name, loaded or not."""
        if name not in self._models:
            policy = self._policy(name)
            self._models[name] = Resident(name, policy.title, is_pinned=policy.is_pinned, keep_alive=policy.keep_alive)
        return self._models[name]

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
        self._changed.set()
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
        return min(self._waiting(), key=lambda model: (model.lets_others_load, model.urgency()), default=None)

    def _waiting(self) -> Iterator[Resident[LoadedT]]:
        """Yield the models whose load has not started, although requests need them."""
        return (model for model in self if model.is_wanted and model.state is State.WAITING)

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
                await self._free_memory(model)
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
        allotted = await self._make_room(model, needs, task)
        model.state, started = State.LOADING, self._clock()
        has_waited_long = model.urgency()[0] is ServiceClass.BACKGROUND and not self._is_patient(model)
        try:
            loaded = await asyncio.to_thread(self._loader.load, model.name, allotted, task, model.parked)
        except OutOfMemory as error:
            raise with_numbers(error, model.title, needs, allotted) from error
        try:
            await loaded.start()
            self.adopt(model.name, loaded)
        except BaseException:
            model.loaded, model.state = None, State.LOADING
            await self._close(model, loaded)
            raise
        model.loads, model.problem, model.load_seconds = model.loads + 1, None, self._clock() - started
        model.keeps_until = self._clock() + model.turn(model.load_seconds) if has_waited_long else 0.0
        log.info("loaded %s in %.1f s", model.title, model.load_seconds)

    async def _free_memory(self, model: Resident[LoadedT]) -> None:
        """Drop all parked caches, and unload all idle models.

        An allocation failed although the model fits according to the ledger, so the missing bytes are not known.
        """
        model.parked = None
        for other in map(self.of, self.memory.ledger({}).idle):
            if not other.is_used:
                await self._switch(other, model)
        await asyncio.to_thread(return_freed_memory)

    async def _make_room(self, model: Resident[LoadedT], needs: Needs, task: LoadTask) -> Mapping[str, int]:
        """Unload what has to be unloaded. Returns the bytes that the model may use of each memory."""
        wanted = needs.useful
        while True:
            self._check_load(model, task)
            self._changed.clear()
            ledger = await self.memory.measured_ledger()
            match ledger.plan(wanted, model.name if model.parked is not None else ""):
                case Fits():
                    return {memory: ledger.free(memory) for memory in wanted}
                case Unload([model.name]):
                    model.parked = None
                case Unload(names) if self._is_patient(model) and not self._are_unused(names):
                    await self._wait_for_pause(model)
                case Unload(names):
                    for victim in map(self.of, names):
                        if victim.is_used:  # a request arrived while another victim was unloaded
                            break
                        await self._switch(victim, model)
                case Wait(names) if background := self._suspendable(model, names):
                    await self._switch(background, model, suspends=True)
                case Wait(names) if self._is_patient(model) and not self._are_in_background(names):
                    await self._wait_for_pause(model)
                case Wait(names):
                    await self._wait_for_end(model, names)
                case Blocked(names):
                    task.stage = f"waiting for the memory of {self._titled(names)}"
                    for other in names:
                        self.advice.ask(other, model.name)
                    await self._changed.wait()
                case Never() if needs.least is not None and wanted is not needs.least:
                    wanted = needs.least
                case Never() as verdict:
                    raise await asyncio.to_thread(self._refusal, model, verdict)

    def _check_load(self, model: Resident[LoadedT], task: LoadTask) -> None:
        """Raise LoadStopped if the load was stopped, the server is closing, or a more urgent model waits.

        A load for which models have been unloaded is not stopped: requests for these models would stop it every time.
        """
        task.check()
        others = () if task.is_committed else self._others_to_load(model)
        if self.is_closed or any(other.urgency() < model.urgency() for other in others):
            raise LoadStopped("The load was stopped")

    def _others_to_load(self, model: Resident[LoadedT]) -> Sequence[Resident[LoadedT]]:
        return [other for other in self._waiting() if other is not model and not other.lets_others_load]

    async def _wait_for_pause(self, model: Resident[LoadedT]) -> None:
        """Wait until other models are used less. Raises LoadStopped if another model waits, which may fit."""
        if self._others_to_load(model):
            model.lets_others_load = True
            raise LoadStopped("Another model is loaded first")
        if model.task is not None:
            model.task.stage = "waiting for a pause of other models"
        await self._wait_for_change()

    def _refusal(self, model: Resident[LoadedT], verdict: Never) -> InglenookError:
        """Return the error for a model that does not fit. Runs on a thread."""
        size = self._loader.capacity().get(verdict.memory, 0)
        capacity = min(size, self._limits.get(verdict.memory, size))
        return refusal(model.title, verdict, capacity, self._loader.remedy(model.name))

    async def _switch(self, victim: Resident[LoadedT], model: Resident[LoadedT], *, suspends: bool = False) -> None:
        """Unload a model, or drop its parked cache, so that another one fits. See `_unload`."""
        victim.parked, was_loaded = None, victim.loaded is not None
        await self._unload(victim, Reason.MEMORY, suspends=suspends)
        if model.task is not None:
            model.task.is_committed = model.task.is_committed or was_loaded
        if was_loaded:
            self.advice.note_switch(victim.name, model.name, self._clock())

    def _suspendable(self, model: Resident[LoadedT], names: Sequence[str]) -> Resident[LoadedT] | None:
        """Return a model to suspend, if `model` is needed by a request that is not in the background, and all models
        that use its memory can be suspended.
        """
        used = [other for other in map(self.of, names) if other.is_used]
        is_urgent = model.urgency()[0] is not ServiceClass.BACKGROUND
        may_be = all(other.can_be_suspended and self._clock() >= other.keeps_until for other in used)
        return used[0] if used and is_urgent and may_be else None

    async def _wait_for_end(self, model: Resident[LoadedT], names: Sequence[str]) -> None:
        """Let busy models admit requests until their turns end, and wait for the next change."""
        now = self._clock()
        for other in map(self.of, names):
            in_background = other.entry(now).use is Use.BACKGROUND
            ends = now if in_background else now + other.turn(max(model.load_seconds, other.load_seconds))
            other.yields_at = ends if other.yields_at is None else min(ends, other.yields_at)
        if model.task is not None:
            model.task.stage = f"waiting for {self._titled(names)}"
        await self._wait_for_change()

    async def _wait_for_change(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), POLL_SECONDS)

    def _is_patient(self, model: Resident[LoadedT]) -> bool:
        """Whether only background requests wait for a model, and not for long."""
        service, arrival = model.urgency()
        return service is ServiceClass.BACKGROUND and self._clock() - arrival < PATIENCE

    def _are_unused(self, names: Sequence[str]) -> bool:
        """Whether no request of another class has used one of the models lately, as far as they are loaded."""
        used = [other.last_urgent for other in map(self.of, names) if other.loaded is not None]
        return self._clock() - max(used, default=-math.inf) >= PATIENT_GAP

    def _are_in_background(self, names: Sequence[str]) -> bool:
        """Whether all requests of the models run in the background."""
        return not any(self.of(name).entry(self._clock()).use is Use.BUSY for name in names)

    def _titled(self, names: Sequence[str]) -> str:
        return ", ".join(self.of(name).title for name in names)

    def _on_load_failure(self, model: Resident[LoadedT], error: Exception) -> None:
        release_frames(error)  # the error is kept, and would keep what the load has allocated
        model.failed_loads += 1
        problem = problem_of(error, model.title)
        model.state, model.problem, model.retry_at = State.FAILED, problem, self._clock() + pause_after(problem)
        model.refuse(problem)
        self._end_suspended(model, problem.message)

    def _end_suspended(self, model: Resident[LoadedT], problem: str) -> None:
        """End the requests of a model that will not be loaded again."""
        suspended, model.suspended = model.suspended, None
        if suspended is not None:
            suspended.end(problem)

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
        self._failing = asyncio.create_task(self._unload(model, Reason.FAILURE))

    # -- unloading

    async def _unload(self, model: Resident[LoadedT], reason: Reason, *, suspends: bool = False) -> None:
        """Return the memory of a model that no request uses, or that `suspends` its requests."""
        loaded = model.loaded
        if loaded is None:
            return
        model.state = State.UNLOADING
        try:
            memories, before = loaded.memories(), await self.memory.uncounted(model)
            if suspends:
                model.parked = await self._suspend(model, loaded)
            else:
                model.parked = await self._close(model, loaded, parks=reason in PARKING)
            model.loaded = loaded = None
            await asyncio.to_thread(trim)  # the engine trimmed before its tokenizer was freed
            model.unfreed = unfreed_by(memories, before, await self.memory.uncounted(model), model.unfreed)
            if model.unfreed:
                numbers = ", ".join(f"{format_bytes(it.num_bytes)} ({name})" for name, it in model.unfreed.items())
                log.warning("%s was unloaded, but did not free %s", model.title, numbers)
        finally:
            model.loaded = loaded = None
            model.state = State.WAITING if model.is_wanted else State.UNLOADED
            model.yields_at = None
            model.unloads[reason] += 1
            log.info("unloaded %s (%s)", model.title, reason.value)
            self._notify()

    async def _close(self, model: Resident[LoadedT], loaded: LoadedT, *, parks: bool = False) -> "ParkedCache | None":
        """Close a loaded model. Its errors are only logged: the memory is measured again before the next load."""
        try:
            return await loaded.close(parks=parks)
        except Exception:
            log.exception("%s was not closed cleanly", model.title)
            return None

    async def _suspend(self, model: Resident[LoadedT], loaded: LoadedT) -> "ParkedCache | None":
        """Close a loaded model, and keep its requests for its next load. If that fails, they end."""
        try:
            suspended, parked = await loaded.suspend()
        except Exception:
            log.exception("the requests of %s could not be suspended", model.title)
            return await self._close(model, loaded)
        if not suspended.is_empty:
            model.suspended, model.suspended_at = suspended, self._clock()
        if self.is_closed:
            self._end_suspended(model, CLOSING)
        return parked

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
            self._changed.clear()
            if not model.is_used and model.state is State.LOADED:
                await self._unload(model, Reason.REQUEST)
                return True
            model.yields_at = self._clock()
            await self._changed.wait()
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
                self._expiring = asyncio.create_task(self._unload(model, Reason.IDLE))
        later = [expires_at for expires_at in times.values() if expires_at > now]
        if later:
            self._expiry = asyncio.get_running_loop().call_later(min(later) - now, self._notify)

    async def close(self) -> None:
        """Refuse all requests, stop the load, and unload all models."""
        self.is_closed = True
        for model in self:
            model.refuse(EngineError(CLOSING))
            self._end_suspended(model, CLOSING)
            if model.task is not None:
                model.task.is_stopped = True
        self._changed.set()
        self.advice.close()
        if self._load is not None:
            await asyncio.wait((self._load,))
        await asyncio.gather(*(self._close(model, model.loaded) for model in self if model.loaded is not None))
