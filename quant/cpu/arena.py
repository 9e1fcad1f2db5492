"""Memory at fixed addresses for recorded programs: weights, buffers, caches.

Big pieces are taken from the system at once and come in huge pages where it has them; a page is only real once it is
written. Every region is followed by a guard that nobody may write: `check` finds who did. Knows bytes. Refuses to know
what they mean.
"""

from bisect import bisect_right
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

CHUNK = 64 << 20  # bytes asked for at a time
ALIGNMENT = 64
GUARD = 64  # bytes behind a region
GUARD_BYTE = 0xA5


@dataclass(frozen=True, slots=True)
class Region:
    """Some bytes of an arena, zero at first."""

    name: str
    bytes: NDArray[np.uint8]

    @property
    def address(self) -> int:
        return int(self.bytes.ctypes.data)

    @property
    def size(self) -> int:
        return self.bytes.nbytes

    def view(self, dtype: DTypeLike, *shape: int) -> NDArray[Any]:
        """The region's beginning as an array."""
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.bytes[:count].view(dtype).reshape(shape)


class Overrun(RuntimeError):
    """Somebody wrote behind the end of a region."""


@dataclass(frozen=True, slots=True)
class AddressRanges:
    """Address ranges, first and end, in order; they do not overlap."""

    ranges: list[tuple[int, int]]

    def contains(self, address: int, size: int) -> bool:
        """Whether `size` bytes at `address` lie within one region."""
        index = bisect_right(self.ranges, (address, 1 << 63)) - 1
        return index >= 0 and self.ranges[index][0] <= address and 0 <= size <= self.ranges[index][1] - address


class Arena:
    """Hands out regions, and keeps them for as long as it lives. Several threads may take some at a time."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._chunk = np.empty(0, np.uint8)
        self._used = 0
        self._regions: list[tuple[Region, NDArray[np.uint8]]] = []  # with the guard behind each
        self._chunks: list[NDArray[np.uint8]] = []

    def allocate(self, name: str, size: int) -> Region:
        """`size` bytes of zeros, aligned to cache lines, never moved."""
        with self._lock:
            return self._allocate(name, size)

    def _allocate(self, name: str, size: int) -> Region:
        start = self._used + (-(self._chunk.ctypes.data + self._used)) % ALIGNMENT
        if start + size + GUARD > self._chunk.nbytes:
            self._chunk = np.zeros(max(CHUNK, size + GUARD + ALIGNMENT), np.uint8)
            self._chunks.append(self._chunk)
            start = -self._chunk.ctypes.data % ALIGNMENT
        self._used = start + size + GUARD
        region = Region(name, self._chunk[start : start + size])
        guard = self._chunk[start + size : self._used]
        guard[:] = GUARD_BYTE
        self._regions.append((region, guard))
        return region

    def check_guards(self) -> None:
        """Raise Overrun, naming the region, where a guard is damaged."""
        for region, guard in self._regions:
            if not (guard == GUARD_BYTE).all():
                raise Overrun(f"something was written behind the {region.size} bytes of {region.name}")

    def shared(self, name: str, size: int) -> Region:
        """The region of this name, taken when it is asked for the first time."""
        there = next((region for region, _ in self._regions if region.name == name), None)
        return there if there is not None and there.size >= size else self.allocate(name, size)

    def adopt(self, name: str, memory: NDArray[np.uint8]) -> Region:
        """Memory of somebody else's, which the caller keeps alive, as a region without a guard."""
        region = Region(name, memory)
        self._regions.append((region, memory[:0]))
        return region

    def address_ranges(self) -> "AddressRanges":
        """The regions there are now, to look addresses up in."""
        return AddressRanges(sorted((region.address, region.address + region.size) for region, _ in self._regions))

    @property
    def nbytes(self) -> int:
        return sum(region.size for region, _ in self._regions)
