"""Typed access to the fields of a model file's metadata, which is untrusted.

Every error is a ModelFileError that names the field.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

from quant.errors import ModelFileError
from quant.string_array import StringArray

T = TypeVar("T")

_ARRAYS = (list, tuple, StringArray)


def malformed(problem: str) -> ModelFileError:
    """Return the error for an invalid field."""
    return ModelFileError(problem, "The file may be damaged or incomplete: remove it and pull it again.")


class CheckedFields:
    """A mapping of names to values of unknown types, accessed field by field."""

    def __init__(self, values: Mapping[str, object], path: str = "") -> None:
        """`path` is put before the names of fields in errors."""
        self._values = values
        self._path = path

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def is_object(self, name: str) -> bool:
        """Whether the field is an object."""
        return isinstance(self._values.get(name), dict)

    def is_array(self, name: str) -> bool:
        """Whether the field is an array."""
        return isinstance(self._values.get(name), _ARRAYS)

    def get(self, name: str, kind: type[T]) -> T | None:
        """Return the value of a field if it is exactly of type `kind`. None: the field is missing or null."""
        value = self._values.get(name)
        if value is None or type(value) is kind:
            return value
        raise malformed(f"{self._path}{name} is of type {type(value).__name__}, not {kind.__name__}")

    def require(self, name: str, kind: type[T]) -> T:
        """Return the value of a required field."""
        value = self.get(name, kind)
        if value is None:
            raise malformed(f"{self._path}{name} is missing")
        return value

    def array(self, name: str, kind: type[T]) -> Sequence[T]:
        """Return a required array with elements that are all exactly of type `kind`."""
        found = self._values.get(name)
        if found is None:
            raise malformed(f"{self._path}{name} is missing")
        values: Sequence[Any] | None = found if isinstance(found, _ARRAYS) else None
        if values is None or not _kinds(values) <= {kind}:
            raise malformed(f"{self._path}{name} is not an array of {kind.__name__}")
        return values

    def child(self, name: str) -> "CheckedFields":
        """Return the fields of a required object."""
        return CheckedFields(self.require(name, dict), f"{self._path}{name}.")


def _kinds(values: Collection[object]) -> set[type]:
    return {str} if isinstance(values, StringArray) else set(map(type, values))
