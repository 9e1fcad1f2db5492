"""Typed, bounded look-ups in a checkpoint's metadata, for the config tables of the model families.

A value that is missing, of another type or out of its bounds is an UnsupportedModel error that names the key.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from engine.errors import UnsupportedModel


@dataclass(frozen=True, slots=True)
class Metadata:
    """The metadata of one checkpoint; `architecture` stands for the `{arch}` of the keys."""

    values: Mapping[str, object]
    architecture: str

    def integer(self, key: str, default: int | None = None, *, most: int = 1 << 20) -> int:
        """An integer from 1 to `most`."""
        name, value = self._find(key, default)
        if type(value) is not int or not 1 <= value <= most:
            raise UnsupportedModel(f"{name} is {value!r}, and must be a whole number from 1 to {most}")
        return value

    def number(self, key: str, default: float | None = None, *, least: float, most: float) -> float:
        """A float from `least` to `most`."""
        name, value = self._find(key, default)
        if type(value) not in (int, float) or not least <= value <= most:  # type: ignore[operator]  # also NaN
            raise UnsupportedModel(f"{name} is {value!r}, and must be a number from {least} to {most}")
        return float(value)  # type: ignore[arg-type]

    def refuse(self, key: str, *allowed: object) -> None:
        """Raise unless the key is absent or has one of the `allowed` values."""
        name = key.format(arch=self.architecture)
        value = self.values.get(name)
        if value is not None and value not in allowed:
            raise UnsupportedModel(f"{name} = {value!r} is not supported by this version")

    def _find(self, key: str, default: object) -> tuple[str, object]:
        name = key.format(arch=self.architecture)
        value = self.values.get(name, default)
        if value is None:
            raise UnsupportedModel(f"The checkpoint does not say {name}", "The file may be damaged: pull it again.")
        return name, value
