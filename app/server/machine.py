"""Disk space, GPU memory, and decode rate of a server, for its report.

Values are read when a client asks. The folder of the disk cache, which can hold thousands of files, is scanned at most
every few seconds.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from msgspec import Struct

from app.models.machine_memory import memory_without_gpu
from engine.kv.disk.folder import resolve_limit, segment_files
from engine.system_memory import resident_bytes

_SCAN_SECONDS = 5.0  # seconds between two scans of the folder


class AmountReport(Struct):
    """An amount and its limit, in bytes."""

    used: int
    total: int


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Memory of the GPU that runs the engine, in bytes."""

    total: int
    free: Callable[[], int]
    own: Callable[[], int]  # returns the bytes that this process uses


class Machine:
    """The disk space and the GPU memory of one server. Several threads may call it: at worst, the folder is scanned
    twice.
    """

    def __init__(
        self,
        disk: Path | None = None,
        disk_limit: int | None = None,
        gpu: GpuMemory | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Set the sources of the report.

        `disk` is the cache folder of all models, or None if nothing is written. `disk_limit` is in bytes; None derives
        it from the free space.
        """
        self._disk = disk
        self._limit = disk_limit
        self._gpu = gpu
        self._clock = clock
        self._last_scan: tuple[float, AmountReport] | None = None  # the time of the last scan and its result

    def disk(self) -> AmountReport | None:
        if self._disk is None:
            return None
        if self._last_scan is None or self._clock() - self._last_scan[0] >= _SCAN_SECONDS:
            used = sum(file.size for file in segment_files(self._disk))
            self._last_scan = self._clock(), AmountReport(used, resolve_limit(self._disk, self._limit, used))
        return self._last_scan[1]

    def gpu(self) -> AmountReport | None:
        """Return the used and total GPU memory, which includes memory that other programs use."""
        if self._gpu is None:
            return None
        return AmountReport(max(0, self._gpu.total - self._gpu.free()), self._gpu.total)

    def room(self) -> int:
        """Return the memory in bytes that another model could use once this process has ended.

        0 if that is unknown: the other model might run on a GPU that this process does not use.
        """
        if self._gpu is not None:
            return self._gpu.free() + self._gpu.own()
        free = memory_without_gpu()
        return 0 if free is None else free + (resident_bytes() or 0)
