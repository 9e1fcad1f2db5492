"""Paths to values in settings files, and the operations that all formats of such files support.

An operation changes the bytes of one value and of its separators. Comments, order, indentation, and line ends stay.
"""

from abc import ABC, abstractmethod
from typing import Final, Literal, TypeAlias

import msgspec

from app.errors import AppError


class Item(msgspec.Struct, frozen=True, array_like=True):
    """The item of a list whose member `key` is `value`."""

    key: str
    value: str

    def __str__(self) -> str:
        return f"[{self.key}={self.value}]"


KeyPath: TypeAlias = tuple[str | Item, ...]  # from the root of a file to a value
Format: TypeAlias = Literal["json", "yaml", "text"]


class _Absent:
    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Final = _Absent()  # there is no value at a path
NOTHING: Final = -1  # depth of a path in a file without content


class InvalidFile(AppError):
    """A settings file cannot be read, or cannot be edited safely."""


class InvalidText(ValueError):
    """The text of a file does not have the format. `index`: position of the first wrong character."""

    def __init__(self, problem: str, index: int) -> None:
        super().__init__(problem)
        self.index = index


class Unwritable(ValueError):
    """The text has a form that cannot be edited safely."""


class Document(ABC):
    """The text of a settings file. Raises InvalidText if it does not have the format."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._read()

    @abstractmethod
    def _read(self) -> None:
        """Find the values in the text. Raises InvalidText."""

    @abstractmethod
    def get(self, path: KeyPath) -> object:
        """Return a value, or ABSENT."""

    @abstractmethod
    def source(self, path: KeyPath) -> str:
        """Return the text of an existing value."""

    @abstractmethod
    def put_source(self, path: KeyPath, source: str) -> None:
        """Replace the text of an existing value."""

    @abstractmethod
    def put(self, path: KeyPath, value: object) -> None:
        """Set a value, and create missing objects and lists that contain it. Raises Unwritable."""

    @abstractmethod
    def remove(self, path: KeyPath) -> None:
        """Remove an existing value. Raises Unwritable."""

    def has(self, path: KeyPath) -> bool:
        """Whether there is a value at a path."""
        return self.get(path) is not ABSENT

    def depth(self, path: KeyPath) -> int:
        """Return the number of leading steps of a path that exist; NOTHING: the file has no content."""
        existing = (length for length in range(len(path), -1, -1) if self.has(path[:length]))
        return next(existing, NOTHING)

    def replace(self, start: int, end: int, text: str) -> None:
        """Replace a part of the text, and read it again."""
        self.text = self.text[:start] + text + self.text[end:]
        self._read()

    @property
    def line_end(self) -> str:
        """The line end that the file uses."""
        first = self.text.find("\n")
        return "\r\n" if first > 0 and self.text[first - 1] == "\r" else "\n"


class WholeText(Document):
    """A file that is one value: its text, at the empty path."""

    def _read(self) -> None:
        pass

    def get(self, path: KeyPath) -> object:
        return ABSENT if path else self.text

    def source(self, path: KeyPath) -> str:
        return self.text

    def put_source(self, path: KeyPath, source: str) -> None:
        self.text = source

    def put(self, path: KeyPath, value: object) -> None:
        self.text = str(value)

    def remove(self, path: KeyPath) -> None:
        self.text = ""


def nested(value: object, path: KeyPath) -> object:
    """Return a value in the objects and lists of `path`."""
    for step in reversed(path):
        value = {step: value} if isinstance(step, str) else [value]
    return value


def leading_blanks(text: str, index: int) -> str:
    """Return the indentation of the line that contains a position."""
    start = max(text.rfind("\n", 0, index), text.rfind("\r", 0, index)) + 1
    line = text[start:index].removeprefix("\ufeff")
    return line[: len(line) - len(line.lstrip(" \t"))]
