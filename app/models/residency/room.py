"""Room: frees the memory that a model needs, before its load.

Models that no request uses are unloaded first. A model with running requests is not unloaded, unless all of them run in
the background: then they are suspended. Otherwise it admits new requests for a while, whose length follows the measured
time of a switch, and then it is unloaded.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Generic

from app.models.residency.ledger import Blocked, Fits, Never, Unload, Use, Wait
from app.models.residency.load_failures import refusal
from app.models.residency.memory import ResidentMemory
from app.models.residency.resident import LoadedT, Loader, LoadTask, Needs, Reason, Resident
from app.models.residency.resident_set import ResidentSet
from app.models.residency.switch_advice import SwitchAdvice
from app.models.residency.unloading import Unloading
from engine.errors import LoadStopped
from engine.freed_memory import return_freed_memory
from engine.request import ServiceClass
from quant.errors import InglenookError

PATIENT_GAP = 30.0  # seconds without requests of other classes after which a model may be unloaded for background ones


class Room(Generic[LoadedT]):
    """Makes room for the models of one server."""

    def __init__(
        self,
        loader: Loader[LoadedT],
        models: ResidentSet[LoadedT],
        memory: ResidentMemory[LoadedT],
        unloading: Unloading[LoadedT],
        advice: SwitchAdvice[LoadedT],
    ) -> None:
        self._loader = loader
        self._models = models
        self._memory = memory
        self._unloading = unloading
        self._advice = advice

    async def make(self, model: Resident[LoadedT], needs: Needs, task: LoadTask) -> Mapping[str, int]:
        """Unload what has to be unloaded. Returns the bytes that the model may use of each memory."""
        wanted = needs.useful
        while True:
            self._check_load(model, task)
            self._models.changed.clear()
            ledger = await self._memory.measured_ledger()
            match ledger.plan(wanted, model.name if model.parked is not None else ""):
                case Fits():
                    return {memory: ledger.free(memory) for memory in wanted}
                case Unload([model.name]):
                    model.parked = None
                case Unload(names) if model.is_patient(self._models.clock()) and not self._are_unused(names):
                    await self._wait_for_pause(model)
                case Unload(names):
                    for victim in map(self._models.of, names):
                        if victim.is_used:  # a request arrived while another victim was unloaded
                            break
                        await self._switch(victim, model)
                case Wait(names) if background := self._suspendable(model, names):
                    await self._switch(background, model, suspends=True)
                case Wait(names) if model.is_patient(self._models.clock()) and not self._are_in_background(names):
                    await self._wait_for_pause(model)
                case Wait(names):
                    await self._wait_for_end(model, names)
                case Blocked(names):
                    task.stage = f"waiting for the memory of {self._models.titled(names)}"
                    for other in names:
                        self._advice.ask(other, model.name)
                    await self._models.changed.wait()
                case Never() if needs.least is not None and wanted is not needs.least:
                    wanted = needs.least
                case Never() as verdict:
                    raise await asyncio.to_thread(self._refusal, model, verdict)

    async def free_all(self, model: Resident[LoadedT]) -> None:
        """Drop all parked caches, and unload all idle models.

        An allocation failed although the model fits according to the ledger, so the missing bytes are not known.
        """
        model.parked = None
        for other in map(self._models.of, self._memory.ledger({}).idle):
            if not other.is_used:
                await self._switch(other, model)
        await asyncio.to_thread(return_freed_memory)

    def _check_load(self, model: Resident[LoadedT], task: LoadTask) -> None:
        """Raise LoadStopped if the load was stopped, the server is closing, or a more urgent model waits.

        A load for which models have been unloaded is not stopped: requests for these models would stop it every time.
        """
        task.check()
        others = () if task.is_committed else self._others_to_load(model)
        if self._models.is_closed or any(other.urgency() < model.urgency() for other in others):
            raise LoadStopped("The load was stopped")

    def _others_to_load(self, model: Resident[LoadedT]) -> Sequence[Resident[LoadedT]]:
        return [other for other in self._models.waiting() if other is not model and not other.lets_others_load]

    async def _wait_for_pause(self, model: Resident[LoadedT]) -> None:
        """Wait until other models are used less. Raises LoadStopped if another model waits, which may fit."""
        if self._others_to_load(model):
            model.lets_others_load = True
            raise LoadStopped("Another model is loaded first")
        if model.task is not None:
            model.task.stage = "waiting for a pause of other models"
        await self._models.wait_for_change()

    def _refusal(self, model: Resident[LoadedT], verdict: Never) -> InglenookError:
        """Return the error for a model that does not fit. Runs on a thread."""
        return refusal(model.title, verdict, self._memory.capacity(verdict.memory), self._loader.remedy(model.name))

    async def _switch(self, victim: Resident[LoadedT], model: Resident[LoadedT], *, suspends: bool = False) -> None:
        """Unload a model, or drop its parked cache, so that another one fits. See `Unloading.unload`."""
        victim.parked, was_loaded = None, victim.loaded is not None
        await self._unloading.unload(victim, Reason.MEMORY, suspends=suspends)
        if model.task is not None:
            model.task.is_committed = model.task.is_committed or was_loaded
        if was_loaded:
            self._advice.note_switch(victim.name, model.name, self._models.clock())

    def _suspendable(self, model: Resident[LoadedT], names: Sequence[str]) -> Resident[LoadedT] | None:
        """Return a model to suspend, if `model` is needed by a request that is not in the background, and all models
        that use its memory can be suspended.
        """
        used = [other for other in map(self._models.of, names) if other.is_used]
        is_urgent = model.urgency()[0] is not ServiceClass.BACKGROUND
        may_be = all(other.can_be_suspended and self._models.clock() >= other.keeps_until for other in used)
        return used[0] if used and is_urgent and may_be else None

    async def _wait_for_end(self, model: Resident[LoadedT], names: Sequence[str]) -> None:
        """Let busy models admit requests until their turns end, and wait for the next change."""
        now = self._models.clock()
        for other in map(self._models.of, names):
            in_background = other.entry(now).use is Use.BACKGROUND
            ends = now if in_background else now + other.turn(max(model.load_seconds, other.load_seconds))
            other.yields_at = ends if other.yields_at is None else min(ends, other.yields_at)
        if model.task is not None:
            model.task.stage = f"waiting for {self._models.titled(names)}"
        await self._models.wait_for_change()

    def _are_unused(self, names: Sequence[str]) -> bool:
        """Whether no request of another class has used one of the models lately, as far as they are loaded."""
        used = [other.last_urgent for other in map(self._models.of, names) if other.loaded is not None]
        return self._models.clock() - max(used, default=-math.inf) >= PATIENT_GAP

    def _are_in_background(self, names: Sequence[str]) -> bool:
        """Whether all requests of the models run in the background."""
        return not any(self._models.of(name).entry(self._models.clock()).use is Use.BUSY for name in names)
