"""Scales and zero points of groups of weights, searched for the least squared error.

For a scale s and a zero point z, weights w get the codes q = round(w / s) + z, within bounds. With d = q - z, the scale
of least squared error for these codes is sum(w * d) / sum(d * d), and the error that it leaves is smaller the larger
sum(w * d) ** 2 / sum(d * d) is. Where some weights matter more than others, every sum is weighted by how much. So each
of some ranges, from a little more than the group's own to much less, gives codes, the codes give a scale, and the best
of all is taken. A range includes zero: zero points are codes.

numpy, since its loops take no threads of their own: whoever wants several calls this in several.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

RANGES = tuple(1.05 - 0.03 * step for step in range(16))  # as parts of the group's own
LEAST = np.float32(1e-30)  # a smaller scale has no reciprocal that is sure to be finite


@dataclass(frozen=True, slots=True)
class GroupScales:
    """What was found for each group: float32 [groups, 1]; zero points are integers, and scales positive."""

    scale: Floats
    zero: Floats


def search(weights: Floats, top: int, importance: Floats | None = None) -> GroupScales:
    """The scale and zero point of every group, of finite `weights` [groups, size], for codes from 0 to `top`.

    `importance` [groups, size], above 0 and up to 1, is what each squared error counts; None: all the same.
    About 16 * 6 operations a weight.
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
    """uint8 [groups, size]: the code of every weight, for scales and zero points as they are stored."""
    numbers = np.empty_like(weights)
    _rounded(weights, found.scale, found.zero, top, numbers)
    return (numbers + found.zero).astype(np.uint8)


def _rounded(weights: Floats, scale: Floats, zero: Floats, top: int, out: Floats) -> None:
    """Code less zero point."""
    np.multiply(weights, 1 / scale, out=out)
    np.rint(out, out=out)
    np.maximum(out, -zero, out=out)
    np.minimum(out, top - zero, out=out)


def _dot(left: Floats, right: Floats) -> Floats:
    """[groups, 1]"""
    products: Floats = np.einsum("gi,gi->g", left, right)
    return products[:, np.newaxis]
