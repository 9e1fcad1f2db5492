"""Rotary frequencies: one angle per position for each pair of a head's elements.

Knows the published scaling rules. Refuses to know where their numbers are stored.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, factors: Tensor | None) -> Tensor:
    """float64 [dimensions / 2], radians per position. `factors`, of the same length, divide them."""
    exponents = torch.arange(0, rope.dimensions, 2, dtype=torch.float64) / rope.dimensions
    frequencies = rope.base**-exponents / rope.linear_factor
    return frequencies if factors is None else frequencies / factors.double()


def llama3_factors(rope: RopeConfig, *, factor: float, low: float, high: float, original_context: int) -> Tensor:
    """What Llama 3.1 divides its frequencies by, float64 [dimensions / 2].

    Wavelengths shorter than original_context / high stay, those longer than original_context / low are stretched by
    `factor`, and those between are blended (the `llama3` rope type of transformers' configuration).
    """
    frequencies = inverse_frequencies(rope, None)
    turns = original_context * frequencies / (2 * math.pi)  # full turns within the original context
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


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
