"""Typed access to the fields of a model file's metadata, which is hostile until checked.

Every error is a ModelFileError that names the field.
"""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from quant.errors import ModelFileError

T = TypeVar("T")


class CheckedFields:
    """A mapping of names to values of unknown types, read field by field."""

    def __init__(self, values: Mapping[str, object], path: str = "") -> None:
        """`path` goes in front of field names in errors."""
        self._values = values
        self._path = path

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def is_object(self, name: str) -> bool:
        """Whether the field holds further fields."""
        return isinstance(self._values.get(name), dict)

    def is_array(self, name: str) -> bool:
        """Whether the field holds a list."""
        return isinstance(self._values.get(name), list | tuple)

    def get(self, name: str, kind: type[T]) -> T | None:
        """The value of a field that is exactly of `kind`, or None where it is absent or null."""
        value = self._values.get(name)
        if value is None or type(value) is kind:
            return value
        raise ModelFileError(f"{self._path}{name} is of type {type(value).__name__}, not {kind.__name__}")

    def require(self, name: str, kind: type[T]) -> T:
        """The value of a field that must be there."""
        value = self.get(name, kind)
        if value is None:
            raise ModelFileError(f"{self._path}{name} is missing")
        return value

    def array(self, name: str, kind: type[T]) -> Sequence[T]:
        """A required list or tuple whose elements are all exactly of `kind`."""
        values = self._values.get(name)
        if values is None:
            raise ModelFileError(f"{self._path}{name} is missing")
        if not isinstance(values, list | tuple) or any(type(value) is not kind for value in values):
            raise ModelFileError(f"{self._path}{name} is not an array of {kind.__name__}")
        return values

    def child(self, name: str) -> "CheckedFields":
        """The fields of a required object."""
        return CheckedFields(self.require(name, dict), f"{self._path}{name}.")
