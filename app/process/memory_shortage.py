"""Whether an error means that there is not enough memory, as it comes from Python, the system, or a library."""

import errno
from collections.abc import Iterator

MESSAGE = "There is not enough memory"
REMEDY = "Close other programs, choose a smaller model or a shorter context, or raise the limit (ulimit -v)."

# What the dynamic linker, Python, torch, and modules written in C say; the last where they could not even raise.
_WORDS = (
    "failed to map segment",
    "cannot allocate memory",
    "can't start new thread",
    "can't allocate memory",
    "without exception set",
)
_KINDS = (ImportError, OSError, RuntimeError, SystemError)


def is_memory_shortage(error: BaseException) -> bool:
    """Whether `error`, or one that it came from, says so."""
    return any(
        isinstance(one, MemoryError)
        or (isinstance(one, OSError) and one.errno == errno.ENOMEM)
        or (isinstance(one, _KINDS) and any(word in str(one).lower() for word in _WORDS))
        for one in _line(error)
    )


def _line(error: BaseException) -> Iterator[BaseException]:
    """An error and those that it came from."""
    seen: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and one not in seen:
        seen.append(one)
        yield one
        one = one.__cause__ or one.__context__
