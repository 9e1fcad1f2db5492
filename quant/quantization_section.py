"""The quantization section of a config.json: typed look-ups with checked values.

A value of the wrong type is a damaged file. A value for a scheme that this version cannot decode raises
UnsupportedQuantization, which names the key.
"""

from collections.abc import Collection, Mapping

from quant.errors import DAMAGED, ModelFileError, UnsupportedQuantization

OTHER_COPY = "Use a copy of the model with another quantization."
MAX_GROUP = 1 << 20
SHOWN = 60  # number of characters of a value that a message shows


class QuantizationSection:
    """A JSON object. `path` is its position, for messages. Keys that are not looked up are ignored."""

    def __init__(self, values: object, path: str = "quantization_config") -> None:
        self.path = path
        if not isinstance(values, Mapping):
            raise ModelFileError(f"{path} is {_shown(values)}, not an object", DAMAGED)
        self._values: Mapping[object, object] = values

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def section(self, key: str) -> "QuantizationSection":
        return QuantizationSection(self._values.get(key), f"{self.path}.{key[:SHOWN]}")

    def sections(self, key: str) -> "list[QuantizationSection]":
        """Return the objects in the object `key`."""
        inner = self.section(key)
        return [inner.section(name) for name in inner._values if isinstance(name, str)]

    def text(self, key: str, allowed: Collection[str], default: str | None = None) -> str:
        """Return the string at `key` in lower case. Raises unless it is one of `allowed`."""
        value = self._values.get(key)
        value = default if value is None else value
        if not isinstance(value, str):
            raise self._wrong(key, "a string")
        if value.lower() not in allowed:
            raise self.unsupported(key, allowed)
        return value.lower()

    def texts(self, key: str) -> tuple[str, ...]:
        value = self._values.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, "a list of strings")
        return tuple(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self._values.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def bits(self, key: str, allowed: Collection[int]) -> int:
        value = self._integer(key)
        if value not in allowed:
            raise self.unsupported(key, [str(bits) for bits in allowed])
        return value

    def positive(self, key: str) -> int:
        value = self._integer(key)
        if not 0 < value <= MAX_GROUP:
            raise self._wrong(key, f"from 1 to {MAX_GROUP}")
        return value

    def group_size(self, key: str = "group_size") -> int | None:
        """Return the number of columns that share a scale; None for -1, a whole row."""
        return None if self._integer(key) == -1 else self.positive(key)

    def number(self, key: str) -> float:
        value = self._values.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not -1e30 < value < 1e30:
            raise self._wrong(key, "a number between -1e30 and 1e30")
        return float(value)

    def shape(self, key: str) -> tuple[int, int]:
        """Return the rows and columns of a matrix."""
        match self._values.get(key):
            case [int(rows), int(columns)] if 0 < rows < 1 << 31 and 0 < columns < 1 << 31:
                return rows, columns
        raise self._wrong(key, "the rows and columns of a matrix")

    def refuse(self, key: str) -> None:
        """Raise UnsupportedQuantization if `key` has a value, since it would change the meaning of weights."""
        if self._values.get(key):
            raise UnsupportedQuantization(f"{self.path}.{key} is not supported by this version", OTHER_COPY)

    def unsupported(self, key: str, allowed: Collection[str]) -> UnsupportedQuantization:
        problem = f"{self.path}.{key} is {_shown(self._values.get(key))}; this version supports {', '.join(allowed)}"
        return UnsupportedQuantization(problem, OTHER_COPY)

    def _integer(self, key: str) -> int:
        value = self._values.get(key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, "an integer")
        return value

    def _wrong(self, key: str, wanted: str) -> ModelFileError:
        return ModelFileError(f"{self.path}.{key} is {_shown(self._values.get(key))}, not {wanted}", DAMAGED)


def _shown(value: object) -> str:
    if value is None:
        return "missing"
    if isinstance(value, str | int | float):
        return repr(value)[:SHOWN]
    return "a list" if isinstance(value, list) else "an object"
