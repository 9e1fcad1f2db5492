"""ResidentMemory: the memory of the models of a server, as the ledger counts it and as it is measured."""

import asyncio
from collections.abc import Iterator, Mapping
from typing import Generic

from app.models.residency.ledger import Entry, Ledger
from app.models.residency.resident import LoadedT, Loader, Resident
from app.models.residency.resident_set import ResidentSet
from app.models.residency.unfreed import uncounted

NOT_MEASURED: Mapping[str, int] = {}


class ResidentMemory(Generic[LoadedT]):
    """The memory of all models of one server."""

    def __init__(
        self,
        loader: Loader[LoadedT],
        models: ResidentSet[LoadedT],
        limits: Mapping[str, int],
    ) -> None:
        """`limits`: bytes of each memory that all models may use together."""
        self._loader = loader
        self._models = models
        self._limits = dict(limits)

    def capacity(self, memory: str) -> int:
        """Return the bytes of a memory that models may use if no other program uses any. Asks the machine."""
        size = self._loader.capacity().get(memory, 0)
        return min(size, self._limits.get(memory, size))

    def ledger(self, available: Mapping[str, int], held: Mapping[str, int] = NOT_MEASURED) -> Ledger:
        """Return the memory of all models, next to the `available` bytes of the machine and those of the process."""
        entries = self._entries()
        rest = uncounted(held, entries)
        unfreed = {memory: sum(self._left(memory, size)) for memory, size in rest.items()}
        return Ledger(available, entries, self._limits, unfreed)

    async def measured_ledger(self) -> Ledger:
        """Return the memory of all models, next to that of the machine and of the process as measured now."""
        available = await asyncio.to_thread(self._loader.available)
        return self.ledger(available, await asyncio.to_thread(self._loader.process_memory))

    async def uncounted(self, model: Resident[LoadedT]) -> Mapping[str, int]:
        """Measure the bytes of the process that no entry counts, except that of a model while it is loaded."""
        held = await asyncio.to_thread(self._loader.process_memory)
        return uncounted(held, self._entries(), model.name if model.loaded else "")

    def _entries(self) -> list[Entry]:
        return [model.entry(self._models.clock()) for model in self._models if model.loaded or model.parked]

    def _left(self, memory: str, size: int) -> Iterator[int]:
        """Yield the bytes that each model did not free, if no entry counts `size` bytes of the process."""
        return (model.unfreed[memory].left(size) for model in self._models if memory in model.unfreed)
