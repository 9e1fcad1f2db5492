"""The `samplers` of a request, as llama.cpp's server has them: those that are not named do nothing."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeAlias

from msgspec import Meta

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
    """The known ones that a request names; None: it names none, and all of them are on."""
    if isinstance(samplers, str):
        return [_LETTERS[letter] for letter in samplers if letter in _LETTERS]
    return None if samplers is None else [name for name in samplers if name in (*SAMPLERS, INFILL)]


def only_named(samplers: list[str] | str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """`given`, fields of SamplingParams, without what samplers do that are not named."""
    named = named_samplers(samplers)
    if named is None:
        return {**given}
    shaped = {**given}
    for name, off in SAMPLERS.items():
        shaped |= {} if name in named else off
    return shaped | ({"min_p": INFILL_MIN_P} if INFILL in named else {})
