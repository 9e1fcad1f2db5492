"""Sampling fields of a request: the defaults of those that it leaves open, and the samplers that it names.

Dialects hand over only the fields that a request gave, by the names of SamplingParams.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeAlias

from msgspec import Meta

_NOTHING: Mapping[str, float] = {}
# A penalty looks at the whole prompt. For code insertion that is the file around the gap, whose names the missing part
# has to repeat.
_NOT_FOR_INSERTION = ("repetition_penalty",)
VARIED_TEMPERATURE: Final = 0.7  # of several replies to one prompt by a model for which 0 is recommended


@dataclass(frozen=True, slots=True)
class DefaultSampling:
    """The default value of each sampling field."""

    recommended: Mapping[str, float] | None = None  # by names of SamplingParams; None: each API has its own defaults

    def fill(
        self,
        given: Mapping[str, Any],
        api: Mapping[str, float] = _NOTHING,
        *,
        inserts: bool = False,
        several: bool = False,
    ) -> dict[str, Any]:
        """Return `given`, fields of SamplingParams, with the defaults of all fields that it lacks.

        `api` holds the defaults of the request's own API. They apply if the model's recommendation is turned off.
        `inserts` says that the reply fills a gap in code, `several` that more than one reply to the prompt is wanted,
        all of which would be the same at temperature 0.
        """
        if self.recommended is None:
            return {**api, **given}
        defaults = {**self.recommended}
        if inserts:
            defaults = {name: value for name, value in defaults.items() if name not in _NOT_FOR_INSERTION}
        if several and defaults.get("temperature") == 0:
            defaults["temperature"] = VARIED_TEMPERATURE
        return {**defaults, **given}


API_DEFAULTS = DefaultSampling()

# A list of names, or one letter each. Their order is the engine's own.
SamplerNames: TypeAlias = Annotated[list[str], Meta(max_length=64)] | Annotated[str, Meta(max_length=64)]

# What the sampler for infilling leaves out is about what is less than a fifth as likely as the most likely token.
INFILL_MIN_P: Final = 0.2

INFILL: Final = "infill"

# The fields of SamplingParams that each sampler reads, with the values at which it does nothing.
SAMPLERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "penalties": {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    "dry": {"dry": None},
    "temperature": {"temperature": 1.0},
    "min_p": {"min_p": 0.0},
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
    "xtc": {"xtc_probability": 0.0},
}
_LETTERS: Final[Mapping[str, str]] = {
    "e": "penalties",
    "d": "dry",
    "t": "temperature",
    "m": "min_p",
    "k": "top_k",
    "p": "top_p",
    "x": "xtc",
    "i": INFILL,
}


def named_samplers(samplers: list[str] | str | None) -> list[str] | None:
    """The known samplers among those that a request names. None: it names none, and all samplers are on."""
    if isinstance(samplers, str):
        return [_LETTERS[letter] for letter in samplers if letter in _LETTERS]
    return None if samplers is None else [name for name in samplers if name in (*SAMPLERS, INFILL)]


def only_named(samplers: list[str] | str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given`, fields of SamplingParams, with the samplers turned off that the request does not name."""
    named = named_samplers(samplers)
    if named is None:
        return {**given}
    shaped = {**given}
    for name, off in SAMPLERS.items():
        shaped |= {} if name in named else off
    return shaped | ({"min_p": INFILL_MIN_P} if INFILL in named else {})
