"""Typed, bounded look-ups in a checkpoint's metadata, for the config tables of the model families.

A `Key` has the name of one value in GGUF metadata, and its name in a config.json. A value that is missing, of another
type, or out of bounds raises UnsupportedModel, which names the key as the file spells it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self, TypeVar

from engine.errors import UnsupportedModel

MAX_ITEMS = 1 << 16  # of a list

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Key:
    """The two names of one value; an empty one: that kind of file never has it."""

    gguf: str = ""  # {arch} stands for the architecture
    config: str = ""  # a dot leads into an object


@dataclass(frozen=True, slots=True)
class Metadata:
    """The metadata of one checkpoint. `architecture` is what it calls its family."""

    values: Mapping[str, object]
    architecture: str
    is_config: bool = False  # of a config.json

    def integer(self, key: Key, default: int | None = None, *, least: int = 1, most: int = 1 << 20) -> int:
        """An integer from `least` to `most`."""
        name, value = self._find(key, default)
        if type(value) is not int or not least <= value <= most:
            raise UnsupportedModel(f"{name} is {value!r}, and must be a whole number from {least} to {most}")
        return value

    def number(self, key: Key, default: float | None = None, *, least: float, most: float) -> float:
        """A float from `least` to `most`."""
        name, value = self._find(key, default)
        if type(value) not in (int, float) or not least <= value <= most:  # type: ignore[operator]  # also NaN
            raise UnsupportedModel(f"{name} is {value!r}, and must be a number from {least} to {most}")
        return float(value)  # type: ignore[arg-type]

    def flag(self, key: Key, default: bool | None = None) -> bool:
        name, value = self._find(key, default)
        if type(value) is not bool:
            raise UnsupportedModel(f"{name} is {value!r}, and must be true or false")
        return value

    def text(self, key: Key, default: str | None = None) -> str:
        name, value = self._find(key, default)
        if not isinstance(value, str):
            raise UnsupportedModel(f"{name} is {value!r:.60}, and must be a text")
        return value

    def one_of(self, key: Key, choices: Mapping[str, Item], default: str | None = None) -> Item:
        """What a text stands for."""
        name, value = self._find(key, default)
        if not isinstance(value, str) or value not in choices:
            raise UnsupportedModel(
                f"{name} = {value!r} is not supported by this version", f"Values that are: {', '.join(choices)}."
            )
        return choices[value]

    def items(self, key: Key, kind: type[Item]) -> tuple[Item, ...] | None:
        """A list of values of one type; None: it is not there."""
        value = self.get(key)
        if value is None:
            return None
        fits = isinstance(value, list | tuple) and len(value) <= MAX_ITEMS and all(type(item) is kind for item in value)
        if not fits:
            raise UnsupportedModel(f"{self.name(key)} is {value!r:.60}, and must be a list of {kind.__name__} values")
        return tuple(value)  # type: ignore[arg-type]

    def numbers(self, key: Key, *, least: float, most: float) -> tuple[float, ...]:
        """A list of floats from `least` to `most`."""
        value = self.get(key)
        if not isinstance(value, list | tuple) or len(value) > MAX_ITEMS:
            raise UnsupportedModel(f"{self.name(key)} is {value!r:.60}, and must be a list of numbers")
        one = Key(self.name(key), self.name(key))
        return tuple(Metadata({one.gguf: item}, "").number(one, least=least, most=most) for item in value)

    def with_defaults(self, defaults: Mapping[str, object]) -> Self:
        """With these values, by the file's names, where the checkpoint does not say any."""
        return replace(self, values={**defaults, **self.values})

    def get(self, key: Key) -> object:
        """The value as it is; None: it is not there."""
        name = self.name(key)
        if not self.is_config:
            return self.values.get(name)
        value: object = self.values
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def refuse(self, key: Key, *allowed: object) -> None:
        """Raise unless the key is absent or has one of the `allowed` values."""
        value = self.get(key)
        if value is not None and value not in allowed:
            raise UnsupportedModel(f"{self.name(key)} = {value!r:.60} is not supported by this version")

    def name(self, key: Key) -> str:
        """As the file spells it."""
        return key.config if self.is_config else key.gguf.format(arch=self.architecture)

    def _find(self, key: Key, default: object) -> tuple[str, object]:
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            raise UnsupportedModel(
                f"The checkpoint does not say {self.name(key)}", "The file may be damaged: pull it again."
            )
        return self.name(key), value
