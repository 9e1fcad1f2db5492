"""Memory-mapped files of named tensors, and sets of such files."""

import contextlib
import errno
import mmap
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

from quant.errors import UNREADABLE, ModelFileError


@contextlib.contextmanager
def regular_file(path: Path) -> Iterator[tuple[int, int]]:
    """Yield the descriptor and length of a regular file.

    Raises ModelFileError for other files, if opening fails, and if the body cannot read or map the file. Raises OSError
    if there is not enough memory to map it.
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


class MappedTensor(Protocol):
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

    def byte_range(self, tensor: MappedTensor) -> tuple[int, int]:
        """Return the positions of the slab's first byte and of its end in the tensor's file."""
        size = tensor.nbytes // self.count
        first = tensor.offset + size * self.index
        return first, first + size


WHOLE = Slab()
Tensor = TypeVar("Tensor", bound=MappedTensor)


class TensorFile(Closing, Generic[Tensor]):
    """An open file of named tensors, which are read-only views of the mapped file.

    If the header cannot be read, the file is closed again. Views outlive `close()`: the file stays mapped as long as a
    view exists.
    """

    tensors: Mapping[str, Tensor]

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open and read the file at `path`. Raises the errors of `regular_file` and of the format's methods."""
        self.path = Path(path)
        with regular_file(self.path) as (descriptor, size):
            self._check_size(size)
            self._map = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        try:
            self._read_header(self._map)
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _check_size(self, size: int) -> None:
        """Raise if the file is too short to have a header."""

    @abstractmethod
    def _read_header(self, data: mmap.mmap) -> None:
        """Set `tensors` and the other fields of the format, after checking that each tensor is within the file."""

    def data(self, name: str, slab: Slab = WHOLE) -> memoryview:
        """Return a read-only view of the bytes of tensor `name`.

        Raises KeyError for an unknown name, and ModelFileError if the file has been truncated: a read of missing bytes
        would end the process.
        """
        first, end = slab.byte_range(self.tensors[name])
        if (size := self._map.size()) < end:
            raise ModelFileError(f"{self.path} was truncated to {size:,} bytes while it was read", "Pull it again.")
        return memoryview(self._map)[first:end]

    def release(self, name: str, slab: Slab = WHOLE) -> None:
        """Release the memory that reading tensor `name` took. Its data can be read from the file again."""
        first, end = slab.byte_range(self.tensors[name])
        if first < end and hasattr(mmap, "MADV_DONTNEED"):
            start = first // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, start, end - start)

    def close(self) -> None:
        """Unmap the file. If views exist, it is unmapped when the last of them is deleted."""
        with contextlib.suppress(BufferError):
            self._map.close()


class TensorFiles(Closing, Generic[Tensor]):
    """The open files of one checkpoint as one set of tensors. Views outlive `close()`."""

    tensors: Mapping[str, Tensor]  # file by file; `offset` is relative to the tensor's file

    def __init__(self, file_of: Mapping[str, TensorFile[Tensor]], opened: contextlib.ExitStack) -> None:
        """Combine open files. `file_of` maps the name of each tensor to its file. `close()` closes everything in
        `opened`.
        """
        self._file_of = file_of
        self.tensors = {name: file.tensors[name] for name, file in file_of.items()}
        self._opened = opened.pop_all()

    def data(self, name: str, slab: Slab = WHOLE) -> memoryview:
        """Return a read-only view of the bytes of tensor `name`. Raises KeyError for an unknown name."""
        return self._file_of[name].data(name, slab)

    def release(self, name: str, slab: Slab = WHOLE) -> None:
        """Release the memory that reading tensor `name` took. Its data can be read from the file again."""
        self._file_of[name].release(name, slab)

    def close(self) -> None:
        self._opened.close()
