"""Memory at fixed addresses for recorded programs: weights, buffers, and caches.

Memory is requested from the system in large chunks, which get huge pages where available. A page uses physical memory
only after it is written. Each region is followed by a guard that must not change: `check_guards` detects overruns.
"""

from bisect import bisect_right
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

CHUNK = 64 << 20  # bytes requested from the system at once
ALIGNMENT = 64
GUARD = 64  # size of the guard after each region in bytes
GUARD_BYTE = 0xA5


@dataclass(frozen=True, slots=True)
class Region:
    """A range of bytes of an arena, initially zero."""

    name: str
    bytes: NDArray[np.uint8]

    @property
    def address(self) -> int:
        return int(self.bytes.ctypes.data)

    @property
    def size(self) -> int:
        return self.bytes.nbytes

    def view(self, dtype: DTypeLike, *shape: int) -> NDArray[Any]:
        """Return the first bytes of the region as an array."""
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.bytes[:count].view(dtype).reshape(shape)


class Overrun(RuntimeError):
    """Code wrote past the end of a region."""


@dataclass(frozen=True, slots=True)
class AddressRanges:
    """Sorted address ranges, each (first, end), without overlaps."""

    ranges: list[tuple[int, int]]

    def contains(self, address: int, size: int) -> bool:
        """Whether `size` bytes at `address` are within one region."""
        index = bisect_right(self.ranges, (address, 1 << 63)) - 1
        return index >= 0 and self.ranges[index][0] <= address and 0 <= size <= self.ranges[index][1] - address


class Arena:
    """Allocates regions, which live as long as the arena. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._chunk = np.empty(0, np.uint8)
        self._used = 0
        self._regions: list[tuple[Region, NDArray[np.uint8]]] = []  # each region with the guard after it
        self._chunks: list[NDArray[np.uint8]] = []

    def allocate(self, name: str, size: int) -> Region:
        """Return `size` bytes of zeros, aligned to cache lines. They are never moved."""
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
        """Raise Overrun, naming the region, if a guard has changed."""
        for region, guard in self._regions:
            if not (guard == GUARD_BYTE).all():
                raise Overrun(f"code wrote past the {region.size} bytes of {region.name}")

    def shared(self, name: str, size: int) -> Region:
        """Return the region called `name`. The first call allocates it, and a call with a larger size does so again."""
        found = next((region for region, _ in self._regions if region.name == name), None)
        return found if found is not None and found.size >= size else self.allocate(name, size)

    def adopt(self, name: str, memory: NDArray[np.uint8]) -> Region:
        """Add memory that the caller keeps alive, as a region without a guard."""
        region = Region(name, memory)
        self._regions.append((region, memory[:0]))
        return region

    def address_ranges(self) -> "AddressRanges":
        """Return the address ranges of the current regions."""
        return AddressRanges(sorted((region.address, region.address + region.size) for region, _ in self._regions))

    @property
    def nbytes(self) -> int:
        return sum(region.size for region, _ in self._regions)
