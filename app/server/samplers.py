"""The `samplers` of a request, as llama.cpp's server has them: those that are not named do nothing."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeAlias

from msgspec import Meta

# A list of names, or one letter each. Their order is the engine's own.
SamplerNames: TypeAlias = Annotated[list[str], Meta(max_length=64)] | Annotated[str, Meta(max_length=64)]

# What the sampler for infilling leaves out is about what is less than a fifth as likely as the most likely token.
INFILL_MIN_P: Final = 0.2

# The fields of SamplingParams that each sampler reads, with the values at which it does nothing.
_OFF: Final[Mapping[str, Mapping[str, Any]]] = {
    "temperature": {"temperature": 1.0},
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "dry": {"dry": None},
    "xtc": {"xtc_probability": 0.0},
    "penalties": {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
}


def only_named(samplers: list[str] | str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """`given`, fields of SamplingParams, without what samplers do that are not named. None and letters name all."""
    if not isinstance(samplers, list):
        return {**given}
    shaped = {**given}
    for name, off in _OFF.items():
        shaped |= {} if name in samplers else off
    return shaped | ({"min_p": INFILL_MIN_P} if "infill" in samplers else {})
