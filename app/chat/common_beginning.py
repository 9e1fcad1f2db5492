"""The longest common beginning of two sequences of one kind.

Found by comparing slices, which costs about as much as reading what both begin with. Refuses to know what the items
mean.
"""

from typing import TypeVar

Items = TypeVar("Items", bytes, tuple[int, ...])  # slices of two kinds would never be equal


def num_common(one: Items, other: Items, start: int = 0) -> int:
    """How many items both begin with; the first `start` are known to be equal."""
    stop, step = min(len(one), len(other)), 1
    while start < stop and one[start : start + step] == other[start : start + step]:
        start, step = start + step, 2 * step
    while step > 1:  # what differs, or the end, is among the next `step` items
        step //= 2
        if start < stop and one[start : start + step] == other[start : start + step]:
            start += step
    return min(start, stop)
