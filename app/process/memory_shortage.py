"""Recognize errors of Python, the system, or a library that mean there is not enough memory."""

import errno
from collections.abc import Iterator

MESSAGE = "There is not enough memory"
REMEDY = "Close other programs, choose a smaller model or a shorter context, or raise the limit (ulimit -v)."

# Messages of the dynamic linker, Python, torch, and C modules. The last message appears if a C module failed without
# being able to raise an error.
_WORDS = (
    "failed to map segment",
    "cannot allocate memory",
    "can't start new thread",
    "can't allocate memory",
    "without exception set",
)
_KINDS = (ImportError, OSError, RuntimeError, SystemError)


def is_memory_shortage(error: BaseException) -> bool:
    """Whether `error`, or an error that caused it, means a shortage of memory."""
    return any(
        isinstance(one, MemoryError)
        or (isinstance(one, OSError) and one.errno == errno.ENOMEM)
        or (isinstance(one, _KINDS) and any(word in str(one).lower() for word in _WORDS))
        for one in _causes(error)
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and the errors that caused it."""
    seen: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and one not in seen:
        seen.append(one)
        yield one
        one = one.__cause__ or one.__context__
