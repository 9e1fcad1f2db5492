"""What a server takes of its machine besides its process's memory: files of what was computed, and a GPU's memory.

Looked at when somebody asks; the files, of which there can be thousands, every few seconds at most. Refuses to know
what is in them, and whose they are.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from msgspec import Struct

from app.models.machine_memory import memory_without_gpu, resident_bytes
from engine.kv.disk.folder import resolve_limit, segment_files

_SCAN_SECONDS = 5.0  # between two looks at the files


class AmountReport(Struct):
    """So much of so much, in bytes."""

    used: int
    total: int


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Of the GPU that computes."""

    total: int  # bytes
    free: Callable[[], int]
    own: Callable[[], int]  # that this process has taken


class Machine:
    """May be asked from several threads: at worst the files are looked at twice."""

    def __init__(
        self,
        disk: Path | None = None,
        disk_limit: int | None = None,
        gpu: GpuMemory | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`disk` is the folder of the files of all models, None where nothing is written; `disk_limit` in bytes, None:
        chosen by what is free."""
        self._disk = disk
        self._limit = disk_limit
        self._gpu = gpu
        self._clock = clock
        self._last_scan: tuple[float, AmountReport] | None = None  # and when

    def disk(self) -> AmountReport | None:
        if self._disk is None:
            return None
        if self._last_scan is None or self._clock() - self._last_scan[0] >= _SCAN_SECONDS:
            used = sum(file.size for file in segment_files(self._disk))
            self._last_scan = self._clock(), AmountReport(used, resolve_limit(self._disk, self._limit, used))
        return self._last_scan[1]

    def gpu(self) -> AmountReport | None:
        """With what other programs take of it."""
        if self._gpu is None:
            return None
        return AmountReport(max(0, self._gpu.total - self._gpu.free()), self._gpu.total)

    def room(self) -> int:
        """Bytes that another model would find once this process has ended; 0: nobody knows, since that one might be
        for a GPU that this one is not on."""
        if self._gpu is not None:
            return self._gpu.free() + self._gpu.own()
        free = memory_without_gpu()
        return 0 if free is None else free + (resident_bytes() or 0)
