"""Make one call of this process that changes files fail, as a full, read-only, or broken disk does."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

ERRORS = (errno.ENOSPC, errno.EROFS, errno.EIO)
CHANGES = ("open", "os.rename", "os.mkdir", "os.chmod")  # audit events; failing removals would only leave files


@dataclass
class Failing:
    """Counts calls. Call number `fails` raises OSError; 0 means that none does."""

    error: int
    fails: int
    calls: int = 0

    def count(self) -> None:
        self.calls += 1
        if self.calls == self.fails:
            raise OSError(self.error, os.strerror(self.error))


@contextmanager
def failing_call(error: int, fails: int) -> Iterator[Failing]:
    """Let call number `fails` that opens a file for writing, renames, or syncs one raise OSError inside the block."""
    failing, listening = Failing(error, fails), True

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if not listening or event not in CHANGES:
            return
        flags = arguments[2] if event == "open" else os.O_WRONLY
        if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR):
            failing.count()

    def fsync(descriptor: int) -> None:
        failing.count()

    sys.addaudithook(hook)  # audit hooks cannot be removed
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            yield failing
    finally:
        listening = False


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Let writes beyond the first `size` bytes of any file fail inside the block. The system does this itself."""
    import resource  # Windows has no such module

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
