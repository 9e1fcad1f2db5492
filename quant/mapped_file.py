"""Regular files, opened to be mapped; and memory of a mapping given back.

Knows files. Refuses to know formats.
"""

import contextlib
import mmap
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from quant.errors import ModelFileError


@contextlib.contextmanager
def regular_file(path: Path) -> Iterator[tuple[int, int]]:
    """The descriptor and the length of a file. Raises ModelFileError when it is not regular or cannot be opened."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        raise ModelFileError(f"Cannot open {path}: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ModelFileError(f"{path} is not a regular file")
        yield descriptor, status.st_size
    finally:
        os.close(descriptor)


def release(mapping: mmap.mmap, offset: int, nbytes: int) -> None:
    """Give back the memory that reading these bytes took. They can be read again, from the file."""
    if nbytes and hasattr(mmap, "MADV_DONTNEED"):
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE
        mapping.madvise(mmap.MADV_DONTNEED, start, offset + nbytes - start)


def close(mapping: mmap.mmap) -> None:
    """Close a mapping, or with views of it alive, leave it to go with the last of them."""
    with contextlib.suppress(BufferError):
        mapping.close()
