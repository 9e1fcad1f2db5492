"""Converts between sampling parameters and the text fields for editing them."""

from collections.abc import Mapping
from dataclasses import dataclass

from tui.types import Sampling


class InvalidField(ValueError):
    """The value of the field `name` is invalid. The message says which values the field accepts."""

    def __init__(self, message: str, name: str = "") -> None:
        super().__init__(message)
        self.name = name


@dataclass(frozen=True, slots=True)
class Field:
    """A text field for one number of Sampling. Empty text means the model's default."""

    name: str
    label: str
    least: float
    most: float
    default: str  # the engine's default, as the user reads it
    is_integer: bool = False

    def hint(self, recommended: Sampling | None) -> str:
        """Return what an empty field means: the value in force and its source. None: no recommendation is known."""
        if recommended is None:
            return "model default"
        value = texts(recommended)[self.name]
        return f"{value} (model)" if value else f"{self.default} (default)"

    def parse(self, text: str) -> float | int | None:
        """Return the typed number, or None for empty text. Raises InvalidField."""
        if not text.strip():
            return None
        try:
            value = int(text) if self.is_integer else float(text)
        except ValueError:
            raise InvalidField(
                f"{self.label} must be a {'whole ' if self.is_integer else ''}number.", self.name
            ) from None
        if not self.least <= value <= self.most:
            raise InvalidField(f"{self.label} must be between {self.least:g} and {self.most:g}.", self.name)
        return value


SAMPLING_FIELDS = (
    Field("temperature", "Temperature", 0, 5, "1.0"),
    Field("top_p", "Top p", 0, 1, "1.0"),
    Field("top_k", "Top k", 0, 1_000_000, "0", is_integer=True),
    Field("min_p", "Min p", 0, 1, "0"),
    Field("repetition_penalty", "Rep. penalty", 0.01, 100, "1.0"),
    Field("seed", "Seed", 0, 2**63 - 1, "random", is_integer=True),
)
REPLY_FIELDS = (Field("max_tokens", "Max tokens", 1, 1_000_000, "no limit", is_integer=True),)
FIELDS = (*SAMPLING_FIELDS, *REPLY_FIELDS)


def texts(sampling: Sampling) -> dict[str, str]:
    """Return the texts of all fields by name."""
    values = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "max_tokens": sampling.max_tokens,
        "seed": sampling.seed,
    }
    return {name: "" if value is None else str(value) for name, value in values.items()}


def change(sampling: Sampling, name: str, text: str) -> Sampling:
    """Return the parameters with one changed. Empty text means the model's default. Raises InvalidField."""
    typed = texts(sampling)
    if name not in typed:
        unknown = f"No parameter {name}. " if name else ""
        raise InvalidField(f"{unknown}Parameters: {', '.join(typed)}. Example: /set temperature 0.2")
    return parse({**typed, name: text}, thinking=sampling.thinking)


def confirm(sampling: Sampling, name: str) -> str:
    """Return a sentence with the new value of a parameter: "Temperature: 0.2"."""
    label = next(field.label for field in FIELDS if field.name == name)
    return f"{label}: {texts(sampling)[name] or 'default'}"


def problems(typed: Mapping[str, str]) -> list[InvalidField]:
    """Return an error for each field whose text is invalid, in the order of the fields."""
    found = []
    for field in FIELDS:
        try:
            field.parse(typed.get(field.name, ""))
        except InvalidField as problem:
            found.append(problem)
    return found


def parse(typed: Mapping[str, str], *, thinking: bool | None) -> Sampling:
    """Return the sampling parameters from the texts of the fields. Raises InvalidField."""
    found = {field.name: field.parse(typed.get(field.name, "")) for field in FIELDS}
    integers = {
        field.name: None if (value := found[field.name]) is None else int(value) for field in FIELDS if field.is_integer
    }
    return Sampling(
        temperature=found["temperature"],
        top_p=found["top_p"],
        top_k=integers["top_k"],
        min_p=found["min_p"],
        repetition_penalty=found["repetition_penalty"],
        max_tokens=integers["max_tokens"],
        seed=integers["seed"],
        thinking=thinking,
    )
