"""Unloading: returns the memory of loaded models, and keeps their KV caches and background requests."""

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic

from app.models.residency.memory import ResidentMemory
from app.models.residency.resident import LoadedT, Reason, Resident, State
from app.models.residency.resident_set import CLOSING, ResidentSet
from app.models.residency.unfreed import unfreed_by
from app.progress import format_bytes
from engine.freed_memory import trim

if TYPE_CHECKING:  # not imported at run time: it imports torch
    from engine.kv.parked_cache import ParkedCache

log = logging.getLogger(__name__)

PARKING = (Reason.MEMORY, Reason.IDLE)  # reasons for which the cache stays in memory, as long as it fits


class Unloading(Generic[LoadedT]):
    """Unloads the models of one server."""

    def __init__(
        self, models: ResidentSet[LoadedT], memory: ResidentMemory[LoadedT], notify: Callable[[], None]
    ) -> None:
        """`notify` is called after each unload."""
        self._models = models
        self._memory = memory
        self._notify = notify

    async def unload(self, model: Resident[LoadedT], reason: Reason, *, suspends: bool = False) -> None:
        """Return the memory of a model that no request uses, or that `suspends` its requests."""
        loaded = model.loaded
        if loaded is None:
            return
        model.state = State.UNLOADING
        try:
            memories, before = loaded.memories(), await self._memory.uncounted(model)
            if suspends:
                model.parked = await self._suspend(model, loaded)
            else:
                model.parked = await self.close(model, loaded, parks=reason in PARKING)
            model.loaded = loaded = None
            await asyncio.to_thread(trim)  # the engine trimmed before its tokenizer was freed
            model.unfreed = unfreed_by(memories, before, await self._memory.uncounted(model), model.unfreed)
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

    async def close(self, model: Resident[LoadedT], loaded: LoadedT, *, parks: bool = False) -> "ParkedCache | None":
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
            return await self.close(model, loaded)
        if not suspended.is_empty:
            model.suspended, model.suspended_at = suspended, self._models.clock()
        if self._models.is_closed:
            model.end_suspended(CLOSING)
        return parked
