"""Returns freed memory to the system, which glibc otherwise keeps for each thread that has used it."""

import contextlib
import ctypes
import gc


def return_freed_memory() -> None:
    """Collect garbage, then `trim`. This takes some tens of milliseconds, but does not block other threads."""
    gc.collect()
    trim()


def trim() -> None:
    """Return free memory to the system. Does nothing if the C library has no malloc_trim."""
    with contextlib.suppress(OSError, TypeError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
