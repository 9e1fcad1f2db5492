"""Ledger: the memory that loaded models may use, and which of them must be unloaded for another one.

A loaded model rarely touches all of its KV cache, so the system reports more free memory than there is. The ledger
therefore counts the bytes that each model may use in the end. Pure arithmetic, without torch.
"""

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

HOST = "host"  # the memory of the machine; the memory of a GPU is named cuda:0, cuda:1, and so on
MAX_COMBINED = 10  # number of idle models up to which every combination is considered


@dataclass(frozen=True, slots=True)
class Bytes:
    """The bytes of one model in one memory."""

    weights: int = 0
    steps: int = 0  # working memory of steps
    cache: int = 0  # KV cache and states
    host_pool: int = 0  # KV blocks that were moved from a GPU
    touched: int = 0  # bytes of `cache` and `host_pool` that have been written at least once
    tokenizer: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.steps + self.cache + self.host_pool + self.tokenizer

    @property
    def untouched(self) -> int:
        """Bytes that the model may still take from the memory that the system reports as free."""
        return max(0, self.cache + self.host_pool - self.touched)


class Use(enum.Enum):
    """Why a model may or may not be unloaded, the first to be unloaded first."""

    PARKED = enum.auto()  # an unloaded model's KV cache
    IDLE = enum.auto()
    BACKGROUND = enum.auto()  # only background requests are running
    BUSY = enum.auto()
    KEPT = enum.auto()  # pinned, loading, or unloading


@dataclass(frozen=True, slots=True)
class Entry:
    """The memory of one model."""

    name: str
    memories: Mapping[str, Bytes]
    use: Use
    last_used: float = 0.0  # seconds, by any clock

    def total(self, memory: str) -> int:
        return self.memories[memory].total if memory in self.memories else 0


@dataclass(frozen=True, slots=True)
class Fits:
    """The model fits now."""


@dataclass(frozen=True, slots=True)
class Unload:
    """The model fits after these models, none of which is busy, are unloaded."""

    names: Sequence[str]


@dataclass(frozen=True, slots=True)
class Wait:
    """The model fits after these models, some of which are busy, are unloaded."""

    names: Sequence[str]


@dataclass(frozen=True, slots=True)
class Blocked:
    """The model fits only after models are unloaded that may not be: pinned ones."""

    names: Sequence[str]


@dataclass(frozen=True, slots=True)
class Never:
    """The model does not fit even if it is alone."""

    memory: str
    needed: int
    available: int  # bytes that the model could have alone


Verdict = Fits | Unload | Wait | Blocked | Never


@dataclass(frozen=True, slots=True)
class Ledger:
    """The memory of a machine at one moment."""

    # memory -> bytes that can be allocated now, as the system reports them
    available: Mapping[str, int]
    entries: Sequence[Entry]
    # memory -> bytes that all models may use together; a memory that is missing has no such limit
    limits: Mapping[str, int] = field(default_factory=dict)
    unfreed: Mapping[str, int] = field(default_factory=dict)  # memory -> bytes that unloaded models did not free

    def free(self, memory: str, without: Iterable[str] = ()) -> int:
        """Return the bytes that another model may use, after the models `without` have been unloaded."""
        gone = frozenset(without)
        held = [entry for entry in self.entries if memory in entry.memories]
        returned = sum(_touched(entry.memories[memory]) for entry in held if entry.name in gone)
        staying = [entry.memories[memory] for entry in held if entry.name not in gone]
        free = self.available.get(memory, 0) + returned - sum(it.untouched for it in staying)
        if memory in self.limits:
            limit = self.limits[memory] - self.unfreed.get(memory, 0)
            free = min(free, limit - sum(it.total for it in staying))
        return max(0, free)

    @property
    def idle(self) -> Sequence[str]:
        """The names of the models that hold memory which no request needs now."""
        return [entry.name for entry in self.entries if entry.use in (Use.PARKED, Use.IDLE)]

    def plan(self, needs: Mapping[str, int], own: str = "") -> Verdict:
        """Return how a model that needs these bytes of each memory can be loaded.

        Among sets of models that may be unloaded, it chooses the set with the fewest bytes, then the least recently
        used one. `own` is the name of the model if it has a parked cache, which is dropped if nothing else suffices.
        """
        if self._suffices(needs, ()):
            return Fits()
        everyone = [entry.name for entry in self.entries]
        for memory, needed in needs.items():
            if needed > (alone := self.free(memory, everyone)):
                return Never(memory, needed, alone)
        parked, idle, background, busy = (
            [entry for entry in self.entries if entry.use is use]
            for use in (Use.PARKED, Use.IDLE, Use.BACKGROUND, Use.BUSY)
        )
        for spared, offered in ((), parked), (parked, idle):
            if (names := self._smallest(needs, spared, offered)) is not None:
                return Unload(names)
        if (names := self._smallest(needs, [*parked, *idle], [*background, *busy])) is not None:
            return Wait(names)
        cache = [entry for entry in self.entries if entry.name == own]
        if cache and self._smallest(needs, [*parked, *idle, *background, *busy], cache) is not None:
            return Unload([own])
        return Blocked([entry.name for entry in self.entries if entry.use is Use.KEPT])

    def _suffices(self, needs: Mapping[str, int], without: Iterable[str]) -> bool:
        gone = tuple(without)
        return all(needed <= self.free(memory, gone) for memory, needed in needs.items())

    def _smallest(
        self, needs: Mapping[str, int], first: Sequence[Entry], offered: Sequence[Entry]
    ) -> Sequence[str] | None:
        """Return the smallest sufficient set of `offered`, with those of `first` that it needs too; None: none is."""
        every = [*first, *offered]
        if not self._suffices(needs, [entry.name for entry in every]):
            return None
        ranked = sorted(every, key=lambda entry: (entry.use.value, entry.last_used))
        if len(ranked) > MAX_COMBINED:
            return self._enough(needs, ranked)
        sets = (chosen for count in range(1, len(ranked) + 1) for chosen in combinations(ranked, count))
        fitting = (chosen for chosen in sets if self._suffices(needs, [entry.name for entry in chosen]))
        return [entry.name for entry in min(fitting, key=lambda chosen: _cost(chosen, needs))]

    def _enough(self, needs: Mapping[str, int], ranked: Sequence[Entry]) -> Sequence[str]:
        """Return the least recently used models until they are enough."""
        names: list[str] = []
        for entry in ranked:
            names.append(entry.name)
            if self._suffices(needs, names):
                break
        return names


def _touched(held: Bytes) -> int:
    """Return the bytes that the system gets back when a model is unloaded."""
    return held.total - held.untouched


def _cost(chosen: Sequence[Entry], needs: Mapping[str, int]) -> tuple[int, int, float]:
    """Return the order of sets of models: the least valuable, the smallest, and the oldest first."""
    size = sum(entry.total(memory) for entry in chosen for memory in needs)
    return max(entry.use.value for entry in chosen), size, max(entry.last_used for entry in chosen)
