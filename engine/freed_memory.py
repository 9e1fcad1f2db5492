"""Gives freed memory back to the system, which glibc otherwise keeps for each thread that has used it."""

import contextlib
import ctypes
import gc


def return_freed_memory() -> None:
    """Collect garbage and give what is free back to the system. Takes some tens of milliseconds; other threads run.

    Does nothing more than collect where the C library has no malloc_trim.
    """
    gc.collect()
    with contextlib.suppress(OSError, TypeError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
