"""The strings of an array in a GGUF file, without an object for each.

A vocabulary and its merges are up to a million strings. As objects they would take eight times the bytes of the file,
and a process that loads and unloads models could not return all of these bytes to the system: the allocator of Python
frees memory in pieces of 1 MiB, and an object that lives longer keeps its whole piece.
"""

import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import overload

LENGTH_BYTES = 8  # size of the length that a file stores before each string


class StringArray(Sequence[str]):
    """Valid UTF-8 strings, made when they are read. Immutable; equal to any sequence of the same strings."""

    __slots__ = ("_data", "_ends")

    def __init__(self, data: bytes, ends: "array.array[int]") -> None:
        """`data` holds each string after its length. `ends` are the offsets of their ends, after that of the start."""
        self._data = data
        self._ends = ends

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[str, ...]: ...
    def __getitem__(self, index: int | slice) -> str | tuple[str, ...]:
        if isinstance(index, slice):
            return tuple(self[one] for one in range(*index.indices(len(self))))
        index = range(len(self))[index]
        return str(self._data[self._ends[index] + LENGTH_BYTES : self._ends[index + 1]], "utf-8")

    def __iter__(self) -> Iterator[str]:
        data = self._data
        return (str(data[start + LENGTH_BYTES : end], "utf-8") for start, end in pairwise(self._ends))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(ours == theirs for ours, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # equal to lists, which have none

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self[:3]))
        return f"<{len(self)} strings: {shown}{', ...' if len(self) > 3 else ''}>"
