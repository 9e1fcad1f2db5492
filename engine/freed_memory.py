"""Frees memory that an error still references, and returns freed memory to the system.

By default, glibc keeps freed memory in a pool for each thread."""

import contextlib
import ctypes
import gc
import traceback


def return_freed_memory() -> None:
    """Collect garbage, then `trim`. This takes 10 to 100 ms, but does not block other threads."""
    gc.collect()
    trim()


def trim() -> None:
    """Return free memory to the system. Does nothing if the C library has no malloc_trim."""
    with contextlib.suppress(OSError, TypeError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def release_frames(error: BaseException) -> None:
    """Clear the local variables, such as a step's tensors, of all functions that `error` and its causes have left."""
    seen: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in seen:
        seen.append(link)
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
