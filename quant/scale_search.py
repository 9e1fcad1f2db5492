"""Search the scales and zero points of groups of weights for the least squared error.

For a scale s and a zero point z, weights w get the codes q = round(w / s) + z, within limits. With d = q - z, the scale
of least squared error for these codes is sum(w * d) / sum(d * d). The larger sum(w * d) ** 2 / sum(d * d) is, the
smaller is the remaining error. If some weights matter more than others, every sum is weighted by their importance. So
the search tries several ranges, from 5 % more than the group's range to 40 % less. Each range gives codes, the codes
give a scale, and the best scale is used. Every range includes zero, because zero points are codes.

It uses numpy, whose loops start no threads: callers run several searches in several threads.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

RANGES = tuple(1.05 - 0.03 * step for step in range(16))  # ranges that are tried, relative to the group's range
LEAST = np.float32(1e-30)  # smallest scale: the reciprocal of a smaller one might not be finite


@dataclass(frozen=True, slots=True)
class GroupScales:
    """The scale and zero point of each group, float32 [groups, 1]. Zero points are integers, scales are positive."""

    scale: Floats
    zero: Floats


def search(weights: Floats, top: int, importance: Floats | None = None) -> GroupScales:
    """Return the scale and zero point of every group of finite `weights` [groups, size], for codes from 0 to `top`.

    `importance` [groups, size], above 0 and up to 1, is the weight of each squared error; None: all are equal. It takes
    about 16 * 6 operations per weight.
    """
    low = np.minimum(weights.min(-1, keepdims=True), 0)
    span = np.maximum(weights.max(-1, keepdims=True), 0) - low
    scales, zeros, best = np.ones_like(low), np.zeros_like(low), np.zeros_like(low)
    numbers = np.empty_like(weights)
    counted = numbers if importance is None else np.empty_like(weights)
    for part in RANGES:
        scale = np.maximum(span * np.float32(part / top), LEAST)
        zero = np.clip(np.rint(low * np.float32(-part) / scale), 0, top)
        _rounded(weights, scale, zero, top, numbers)
        if importance is not None:
            np.multiply(numbers, importance, out=counted)
        shared, norm = _dot(weights, counted), _dot(numbers, counted)
        norm[norm == 0] = 1
        score = shared * (shared / norm)
        better = score > best
        scales, zeros, best = (
            np.where(better, new, old) for new, old in ((shared / norm, scales), (zero, zeros), (score, best))
        )
    return GroupScales(np.maximum(scales, LEAST), zeros)


def codes(weights: Floats, found: GroupScales, top: int) -> NDArray[np.uint8]:
    """Return the code of every weight, uint8 [groups, size], for scales and zero points as they are stored."""
    numbers = np.empty_like(weights)
    _rounded(weights, found.scale, found.zero, top, numbers)
    return (numbers + found.zero).astype(np.uint8)


def _rounded(weights: Floats, scale: Floats, zero: Floats, top: int, out: Floats) -> None:
    """Write codes minus zero points to `out`."""
    np.multiply(weights, 1 / scale, out=out)
    np.rint(out, out=out)
    np.maximum(out, -zero, out=out)
    np.minimum(out, top - zero, out=out)


def _dot(left: Floats, right: Floats) -> Floats:
    """Return the dot products of each group, [groups, 1]."""
    products: Floats = np.einsum("gi,gi->g", left, right)
    return products[:, np.newaxis]
