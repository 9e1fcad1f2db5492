"""Rotary frequencies: one angle per position for each pair of a head's elements.

Knows the published scaling rules. Refuses to know where their numbers are stored.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import LinearScaling, Llama3Scaling, RopeConfig


def inverse_frequencies(rope: RopeConfig, factors: Tensor | None = None) -> Tensor:
    """float64 [dimensions / 2], radians per position. `factors`, of the same length, divide them once more."""
    exponents = torch.arange(0, rope.dimensions, 2, dtype=torch.float64) / rope.dimensions
    frequencies = rope.base**-exponents
    match rope.scaling:
        case LinearScaling(factor):
            frequencies = frequencies / factor
        case Llama3Scaling():
            frequencies = frequencies / _llama3_factors(frequencies, rope.scaling)
    return frequencies if factors is None else frequencies / factors.double()


def _llama3_factors(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """What frequencies are divided by: those that make between `low` and `high` turns in the original context are
    blended, between 1 and the factor."""
    turns = scaling.original_context * frequencies / (2 * math.pi)
    smooth = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    return 1 / ((1 - smooth) / scaling.factor + smooth)


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """Cosine and sine of every angle, float32 [positions, dimensions / 2] each."""

    cos: Tensor
    sin: Tensor
    interleaved: bool  # see RopeConfig


def rotary_table(rope: RopeConfig, factors: Tensor | None, positions: int) -> RotaryTable:
    """The table for positions 0 .. positions - 1."""
    steps = torch.arange(positions, dtype=torch.float64)
    angles = torch.outer(steps, inverse_frequencies(rope, factors))
    return RotaryTable(angles.cos().float(), angles.sin().float(), rope.interleaved)
