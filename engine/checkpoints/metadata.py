"""Typed and bounded access to a checkpoint's metadata.

A `Key` holds the name of a value in GGUF metadata and its name in a config.json. A value that is missing, of another
type, or out of bounds raises UnsupportedModel, and the error shows the key as it is spelled in the file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self, TypeVar

from engine.errors import UnsupportedModel

MAX_ITEMS = 1 << 16  # maximum number of items in a list

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Key:
    """The two names of one value. A name is empty if that kind of file never has the value."""

    gguf: str = ""  # {arch} is replaced by the architecture
    config: str = ""  # dots separate the keys of nested objects


@dataclass(frozen=True, slots=True)
class Metadata:
    """The metadata of one checkpoint."""

    values: Mapping[str, object]
    architecture: str
    is_config: bool = False  # whether it was read from a config.json instead of a GGUF file

    def integer(self, key: Key, default: int | None = None, *, minimum: int = 1, maximum: int = 1 << 20) -> int:
        """Return an integer from `minimum` to `maximum`."""
        name, value = self._find(key, default)
        if type(value) is not int or not minimum <= value <= maximum:
            raise UnsupportedModel(f"{name} is {value!r}, but must be a whole number from {minimum} to {maximum}")
        return value

    def number(self, key: Key, default: float | None = None, *, minimum: float, maximum: float) -> float:
        """Return a float from `minimum` to `maximum`."""
        name, value = self._find(key, default)
        if type(value) not in (int, float) or not minimum <= value <= maximum:  # type: ignore[operator]  # rejects NaN too
            raise UnsupportedModel(f"{name} is {value!r}, but must be a number from {minimum} to {maximum}")
        return float(value)  # type: ignore[arg-type]

    def flag(self, key: Key, default: bool | None = None) -> bool:
        name, value = self._find(key, default)
        if type(value) is not bool:
            raise UnsupportedModel(f"{name} is {value!r}, but must be true or false")
        return value

    def text(self, key: Key, default: str | None = None) -> str:
        name, value = self._find(key, default)
        if not isinstance(value, str):
            raise UnsupportedModel(f"{name} is {value!r:.60}, but must be a string")
        return value

    def one_of(self, key: Key, choices: Mapping[str, Item], default: str | None = None) -> Item:
        """Return the choice that a string value names."""
        name, value = self._find(key, default)
        if not isinstance(value, str) or value not in choices:
            raise UnsupportedModel(
                f"{name} = {value!r} is not supported by this version", f"Supported values: {', '.join(choices)}."
            )
        return choices[value]

    def items(self, key: Key, kind: type[Item]) -> tuple[Item, ...] | None:
        """Return a list of values of one type, or None if the key is absent."""
        value = self.get(key)
        if value is None:
            return None
        fits = isinstance(value, list | tuple) and len(value) <= MAX_ITEMS and all(type(item) is kind for item in value)
        if not fits:
            raise UnsupportedModel(f"{self.name(key)} is {value!r:.60}, but must be a list of {kind.__name__} values")
        return tuple(value)  # type: ignore[arg-type]

    def numbers(self, key: Key, *, minimum: float, maximum: float) -> tuple[float, ...]:
        """Return a list of floats from `minimum` to `maximum`."""
        value = self.get(key)
        if not isinstance(value, list | tuple) or len(value) > MAX_ITEMS:
            raise UnsupportedModel(f"{self.name(key)} is {value!r:.60}, but must be a list of numbers")
        one = Key(self.name(key), self.name(key))
        return tuple(Metadata({one.gguf: item}, "").number(one, minimum=minimum, maximum=maximum) for item in value)

    def with_defaults(self, defaults: Mapping[str, object]) -> Self:
        """Return a copy of the metadata with defaults for missing keys. `defaults` uses the names in the file."""
        return replace(self, values={**defaults, **self.values})

    def get(self, key: Key) -> object:
        """Return the raw value, or None if the key is absent."""
        name = self.name(key)
        if not self.is_config:
            return self.values.get(name)
        value: object = self.values
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def require(self, key: Key, *allowed: object) -> None:
        """Raise UnsupportedModel unless the key is absent or has one of the `allowed` values."""
        value = self.get(key)
        if value is not None and value not in allowed:
            raise UnsupportedModel(f"{self.name(key)} = {value!r:.60} is not supported by this version")

    def name(self, key: Key) -> str:
        """Return the key as it is spelled in the file."""
        return key.config if self.is_config else key.gguf.format(arch=self.architecture)

    def _find(self, key: Key, default: object) -> tuple[str, object]:
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            raise UnsupportedModel(f"The checkpoint has no {self.name(key)}", "The file may be damaged: pull it again.")
        return self.name(key), value
