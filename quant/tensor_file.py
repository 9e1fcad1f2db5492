"""Files of named tensors, and sets of such files.

Files are read, not mapped: after a read error, or if the file was truncated, a read of mapped memory ends the process.
"""

import contextlib
import errno
import os
import stat
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

from quant.errors import UNREADABLE, ModelFileError


@contextlib.contextmanager
def regular_file(path: Path) -> Iterator[tuple[int, int]]:
    """Yield the descriptor and length of a regular file.

    Raises ModelFileError for other files, if opening fails, and if the body cannot read the file. Raises OSError if
    there is not enough memory to read it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        raise ModelFileError(f"Cannot open {path}: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ModelFileError(f"{path} is not a regular file")
        yield descriptor, status.st_size
    except OSError as error:
        if error.errno == errno.ENOMEM:  # the file is not the cause
            raise
        raise ModelFileError(f"Cannot read {path}: {error.strerror}", UNREADABLE) from error
    finally:
        os.close(descriptor)


class Closing(ABC):
    """Base of objects that are closed at the end of a `with`."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class TensorPosition(Protocol):
    """Position of a tensor in its file, in bytes."""

    @property
    def offset(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Slab:
    """One of `count` parts of equal size that a tensor consists of, such as the matrix of one expert."""

    index: int = 0
    count: int = 1

    def byte_range(self, tensor: TensorPosition) -> tuple[int, int]:
        """Return the positions of the slab's first byte and of its end in the tensor's file."""
        size = tensor.nbytes // self.count
        first = tensor.offset + size * self.index
        return first, first + size


WHOLE = Slab()
Tensor = TypeVar("Tensor", bound=TensorPosition)


class TensorFile(Closing, Generic[Tensor]):
    """An open file of named tensors. Threads may read it at the same time.

    If the header cannot be read, the file is closed again.
    """

    tensors: Mapping[str, Tensor]

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open and read the file at `path`. Raises the errors of `regular_file` and of the format's methods."""
        self.path = Path(path)
        with regular_file(self.path) as (descriptor, size):
            self._check_size(size)
            self._descriptor = os.dup(descriptor)
        try:
            self._read_header(size)
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _check_size(self, size: int) -> None:
        """Raise if the file is too short to have a header."""

    @abstractmethod
    def _read_header(self, size: int) -> None:
        """Set `tensors` and the other fields of the format, after checking that each tensor is within the file.

        `size` is the length of the file in bytes.
        """

    def data(self, name: str, slab: Slab = WHOLE) -> memoryview:
        """Return the bytes of tensor `name`, in memory that the caller may change.

        Raises KeyError for an unknown name, and ModelFileError if the file cannot be read or has been truncated.
        """
        return self.read_range(*slab.byte_range(self.tensors[name]))

    def read(self, name: str, slab: Slab, start: int, end: int) -> memoryview:
        """Return a range of the bytes that `data` returns. Raises the same errors."""
        first, _ = slab.byte_range(self.tensors[name])
        return self.read_range(first + start, first + end)

    def read_range(self, first: int, end: int) -> memoryview:
        """Return the bytes of the file from `first` to `end`. Raises ModelFileError."""
        data = memoryview(bytearray(end - first))
        done = 0
        while done < len(data):
            try:
                count = _read_into(self._descriptor, data[done:], first + done)
            except OSError as error:
                raise ModelFileError(f"Cannot read {self.path}: {error.strerror}", UNREADABLE) from error
            if not count:
                size = os.fstat(self._descriptor).st_size
                raise ModelFileError(f"{self.path} was truncated to {size:,} bytes while it was read", "Pull it again.")
            done += count
        return data

    def close(self) -> None:
        """Close the file. Later calls have no effect."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class TensorFiles(Closing, Generic[Tensor]):
    """The open files of one checkpoint as one set of tensors."""

    tensors: Mapping[str, Tensor]  # file by file; `offset` is relative to the tensor's file

    def __init__(self, file_of: Mapping[str, TensorFile[Tensor]], opened: contextlib.ExitStack) -> None:
        """Combine open files. `file_of` maps the name of each tensor to its file. `close()` closes everything in
        `opened`.
        """
        self._file_of = file_of
        self.tensors = {name: file.tensors[name] for name, file in file_of.items()}
        self._opened = opened.pop_all()

    def data(self, name: str, slab: Slab = WHOLE) -> memoryview:
        """Return the bytes of tensor `name`. Raises KeyError for an unknown name, and ModelFileError."""
        return self._file_of[name].data(name, slab)

    def read(self, name: str, slab: Slab, start: int, end: int) -> memoryview:
        """Return a range of the bytes that `data` returns. Raises the same errors."""
        return self._file_of[name].read(name, slab, start, end)

    def close(self) -> None:
        self._opened.close()


if sys.platform == "win32":  # which has no reads at a position
    _reading = Lock()

    def _read_into(descriptor: int, data: memoryview, position: int) -> int:
        with _reading:
            os.lseek(descriptor, position, os.SEEK_SET)
            part = os.read(descriptor, min(len(data), 1 << 30))
        data[: len(part)] = part
        return len(part)

else:

    def _read_into(descriptor: int, data: memoryview, position: int) -> int:
        """Read bytes at a position of a file. Returns their number; 0 at the end of the file."""
        return os.preadv(descriptor, [data], position)
