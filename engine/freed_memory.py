"""Frees memory that an error still references, and returns freed memory to the system.

By default, glibc keeps freed memory in a pool for each thread."""

import contextlib
import ctypes
import gc
import traceback
from types import TracebackType

from quant.errors import InglenookError

_ARENA_MAX = -8  # number of mallopt's parameter
_POOLS = 2


def return_freed_memory() -> None:
    """Collect garbage, then `trim`. This takes 10 to 100 ms, but does not block other threads."""
    gc.collect()
    trim()


def share_pools() -> None:
    """Let all threads allocate from two pools. Each load has new threads, whose pools would keep freed memory.

    Does nothing if the C library is not glibc.
    """
    with contextlib.suppress(OSError, TypeError, AttributeError):
        ctypes.CDLL(None).mallopt(_ARENA_MAX, _POOLS)


def trim() -> None:
    """Return free memory to the system. Does nothing if the C library has no malloc_trim."""
    with contextlib.suppress(OSError, TypeError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class FreeingOnError:
    """Context manager that frees what an error of its body still references: the locals of the functions it has left.

    The errors of users also lose their tracebacks, since a function in a traceback keeps the variables of its closure.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        release_frames(error)
        link: BaseException | None = error if isinstance(error, InglenookError) else None
        while link is not None and link.__traceback__ is not None:
            link.__traceback__ = None
            link = link.__cause__ or link.__context__
        trim()


def release_frames(error: BaseException) -> None:
    """Clear the local variables, such as a step's tensors, of all functions that `error` and its causes have left."""
    seen: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in seen:
        seen.append(link)
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
