"""Rotary frequencies, in radians per position for each pair of a head's elements, with the published scaling rules."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model_config import LinearScaling, Llama3Scaling, LongRopeScaling, RopeConfig, YarnScaling


def inverse_frequencies(rope: RopeConfig, factors: Tensor | None = None, positions: int = 0) -> Tensor:
    """Return the rotary frequencies, float64 [dimensions / 2], in radians per position.

    They are for contexts of up to `positions` tokens. If `factors` (of the same length) are given, the frequencies are
    also divided by them.
    """
    exponents = torch.arange(0, rope.dimensions, 2, dtype=torch.float64) / (rope.span or rope.dimensions)
    frequencies = rope.base**-exponents
    match rope.scaling:
        case LinearScaling(factor):
            frequencies = frequencies / factor
        case Llama3Scaling():
            frequencies = frequencies / _llama3_factors(frequencies, rope.scaling)
        case YarnScaling():
            frequencies = frequencies / _yarn_factors(rope, rope.scaling)
        case LongRopeScaling(short=short, long=long) if short:
            chosen = long if rope.scaling.is_long(positions) else short
            frequencies = frequencies / torch.tensor(chosen, dtype=torch.float64)
    return frequencies if factors is None else frequencies / factors.double()


def _llama3_factors(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Return the divisors of the frequencies for Llama 3 scaling.

    The divisor is `factor` for frequencies with fewer than `low` rotations in the original context, 1 for those with
    more than `high`, and blended in between.
    """
    turns = scaling.original_context * frequencies / (2 * math.pi)
    smooth = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    return 1 / ((1 - smooth) / scaling.factor + smooth)


def _yarn_factors(rope: RopeConfig, scaling: YarnScaling) -> Tensor:
    """Return the divisors of the frequencies for YaRN (arXiv:2309.00071, section 3.2).

    They are blended from 1, for frequencies with `fast` rotations in the original context, to the factor, for those
    with `slow` rotations.
    """

    def number(turns: float) -> float:
        wavelength = scaling.original_context / (turns * 2 * math.pi)
        return rope.dimensions * math.log(wavelength) / (2 * math.log(rope.base))

    low, high = number(scaling.fast), number(scaling.slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dimensions - 1)
    numbers = torch.arange(rope.dimensions // 2, dtype=torch.float64)
    divided = ((numbers - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    return 1 / (divided / scaling.factor + 1 - divided)


def attention_factor(rope: RopeConfig) -> float:
    """Return the scale of cosine and sine. Scores are scaled by its square."""
    match rope.scaling:
        case YarnScaling(attention_factor=float(given)) | LongRopeScaling(attention_factor=float(given)):
            return given
        case YarnScaling() as scaling:
            return _yarn_attention_factor(scaling)
        case LongRopeScaling(original, factor):  # the formula of Phi-3 (arXiv:2404.14219)
            return math.sqrt(1 + math.log(max(factor, 1.0)) / math.log(original))
    return 1.0


def _yarn_attention_factor(scaling: YarnScaling) -> float:
    """Return the scale of cosine and sine for YaRN (arXiv:2309.00071, section 3.4).

    If the configuration has two mscale values, it is the quotient of both, as in DeepSeek-V2 (arXiv:2405.04434).
    """

    def grown(scale: float) -> float:
        return 1 + 0.1 * scale * math.log(scaling.factor)

    both = scaling.mscale and scaling.mscale_all
    return grown(scaling.mscale) / grown(scaling.mscale_all) if both else grown(1.0)


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """Cosine and sine of every angle, times the rope's attention factor. Each is float32 [positions, dimensions /
    2].
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool  # see RopeConfig
    span: int = 0  # see RopeConfig

    @property
    def distance(self) -> int:
        """Number of elements from the first of a pair to the second, unless pairs are interleaved."""
        return self.span // 2 or self.cos.shape[-1]


def rotary_table(rope: RopeConfig, factors: Tensor | None, positions: int) -> RotaryTable:
    """Return the table for positions 0 .. positions - 1. `factors` is as in `inverse_frequencies`."""
    steps = torch.arange(positions, dtype=torch.float64)
    angles = torch.outer(steps, inverse_frequencies(rope, factors, positions))
    scale = attention_factor(rope)
    return RotaryTable((angles.cos() * scale).float(), (angles.sin() * scale).float(), rope.interleaved, rope.span)
