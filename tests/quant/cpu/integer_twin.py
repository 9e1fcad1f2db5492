"""What the CPU kernels compute, in numpy: the same integers, the same roundings, in the order that is written there.

An oracle to the last bit. Knows the arithmetic. Refuses to know tiles, lanes and threads, which must not matter.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quant.tensor import CodedTensor, PlainTensor, QTensor

GROUP = 32
Floats = NDArray[np.float32]


def fma(x: Any, y: Any, z: Any) -> Floats:
    """x * y + z of float32 arrays, rounded once.

    The product is exact in float64. Its sum with z is rounded to odd there, so that rounding it to float32 sees on
    which side of a tie the exact sum lies (Boldo and Melquiond, 2008).
    """
    product, z = np.float64(x) * np.float64(y), np.float64(z)
    total = np.asarray(product + z)
    back = total - product
    error = (product - (total - back)) + (z - back)
    even = total.view(np.int64) & 1 == 0
    odd = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where((error != 0) & even, odd, total).astype(np.float32)


@dataclass(frozen=True)
class QuantizedRows:
    """Rows of activations as whole numbers, [rows, groups, 32], and for each group a scale and scale * sum."""

    whole: NDArray[np.int64]
    scales: Floats
    sums: Floats
    firsts: Floats  # scale * sum of the first 16 columns


def quantize(x: Floats, planes: int) -> QuantizedRows:
    """x [rows, columns] in steps of a group's largest magnitude / 127, or / 16256 for two planes of signed bytes."""
    groups = x.reshape(len(x), -1, GROUP)
    steps = 127 * 128 if planes == 2 else 127
    top = np.abs(groups).max(-1)
    with np.errstate(divide="ignore"):
        inverse = np.where(top > 0, np.float32(steps) / top, np.float32(0))
    whole = np.rint(groups * inverse[..., None]).astype(np.int64)
    scales = top * np.float32(1 / steps)
    firsts = scales * whole[..., : GROUP // 2].sum(-1).astype(np.float32)
    return QuantizedRows(whole, scales, scales * whole.sum(-1).astype(np.float32), firsts)


def product(weight: QTensor, x: Floats, planes: int, there: Floats | None = None) -> Floats:
    """x [rows, columns] times a weight transposed, added to what is there, float32 [rows, outputs]."""
    start = np.zeros((len(x), weight.shape[0]), np.float32) if there is None else there
    if isinstance(weight, PlainTensor):
        return _plain_product(weight.values.float().numpy(), x, start)
    return _coded_product(weight, quantize(x, planes), start)


def _coded_product(weight: CodedTensor, rows: QuantizedRows, total: Floats) -> Floats:
    """Groups, or halves of them, one after another, each with an exact integer sum.

    Numbers are unsigned, as the instruction wants them: what was added to them is a minimum of each group.
    """
    codes, zero = weight.codes.values().numpy().astype(np.int64), weight.zero
    if weight.table:
        codes, zero = np.array(weight.table, np.int64)[codes] - min(weight.table), -min(weight.table)
    size = min(weight.group, GROUP)
    scales = weight.scale.values().numpy()
    least = scales * np.float32(-zero) if weight.minimum is None else -weight.minimum.values().numpy()
    if weight.group > GROUP:
        scales, least = (np.repeat(it, weight.group // GROUP, axis=1) for it in (scales, least))
    codes, whole = codes.reshape(weight.shape[0], -1, size), rows.whole.reshape(len(rows.whole), -1, size)
    halves = GROUP // size
    for g in range(codes.shape[1]):
        group, half = divmod(g, halves)
        sums = (whole[:, g] @ codes[:, g].T).astype(np.float32)
        x_sums = rows.sums[:, group] if halves == 1 else rows.firsts[:, group]
        if half:
            x_sums = rows.sums[:, group] - rows.firsts[:, group]
        total = fma(sums, scales[:, g] * rows.scales[:, group, None], total)
        total = fma(least[:, g], x_sums[:, None], total)
    return total


def _plain_product(values: Floats, x: Floats, there: Floats) -> Floats:
    """Two chains, over the even and the odd columns."""
    chains = np.zeros((2, len(x), len(values)), np.float32)
    for column in range(x.shape[1]):
        chains[column % 2] = fma(values[:, column], x[:, column, None], chains[column % 2])
    total: Floats = chains[0] + chains[1] + there
    return total
