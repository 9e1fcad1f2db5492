"""Memory that unloads did not free, by measurements of the process before and after each unload.

Pure arithmetic. The ledger counts these bytes against the limit of all models, so no load is planned on them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from app.models.residency.ledger import Bytes, Entry

# An unload may free less than this by which the plan of a model and its real memory differ.
ALLOWED_SHARE, ALLOWED_BYTES = 0.05, 128_000_000


@dataclass(frozen=True, slots=True)
class Unfreed:
    """Bytes of one memory that the unloads of a model did not free."""

    num_bytes: int
    uncounted: int  # bytes of the process that no entry of the ledger counted, after the unload

    def left(self, uncounted: int) -> int:
        """Return the bytes that are still not freed, if no entry counts `uncounted` bytes of the process now."""
        return max(0, self.num_bytes - max(0, self.uncounted - uncounted))


def uncounted(held: Mapping[str, int], entries: Sequence[Entry], without: str = "") -> Mapping[str, int]:
    """Return the bytes that the process holds of each memory, and that no entry counts, except the entry `without`."""
    counted = [entry for entry in entries if entry.name != without]
    return {memory: size - sum(_taken(entry.memories, memory) for entry in counted) for memory, size in held.items()}


def unfreed_by(
    memories: Mapping[str, Bytes], before: Mapping[str, int], after: Mapping[str, int], earlier: Mapping[str, Unfreed]
) -> Mapping[str, Unfreed]:
    """Return what the unload of a model did not free.

    `memories`: its bytes before the unload. `before` and `after`: uncounted bytes without its entry. `earlier`: what
    its earlier unloads did not free. A memory that was not measured is left out.
    """
    found = dict[str, Unfreed]()
    for memory in before.keys() & after.keys() & (memories.keys() | earlier.keys()):
        expected = _certain(memories[memory]) if memory in memories else 0
        missing = expected - (before[memory] - after[memory])
        rest = missing if missing > max(ALLOWED_BYTES, ALLOWED_SHARE * expected) else 0
        if memory in earlier:
            rest += earlier[memory].left(before[memory] - expected)
        if rest:
            found[memory] = Unfreed(rest, after[memory])
    return found


def _taken(memories: Mapping[str, Bytes], memory: str) -> int:
    return memories[memory].total - memories[memory].untouched if memory in memories else 0


def _certain(held: Bytes) -> int:
    """Return the bytes that the model has certainly written. Short requests do not use all memory of steps."""
    return held.total - held.untouched - held.steps
