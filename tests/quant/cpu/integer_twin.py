"""What the CPU kernels compute, in numpy: the same integers, the same roundings, in the order that is written there.

An oracle to the last bit. Knows the arithmetic. Refuses to know tiles, lanes and threads, which must not matter.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quant.kernels.reference import unpack_codes
from quant.tensor import AffineTensor, PlainTensor, QTensor

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


def quantize(x: Floats, planes: int) -> QuantizedRows:
    """x [rows, columns] in steps of a group's largest magnitude / 127, or / 16256 for two planes of signed bytes."""
    groups = x.reshape(len(x), -1, GROUP)
    steps = 127 * 128 if planes == 2 else 127
    top = np.abs(groups).max(-1)
    with np.errstate(divide="ignore"):
        inverse = np.where(top > 0, np.float32(steps) / top, np.float32(0))
    whole = np.rint(groups * inverse[..., None]).astype(np.int64)
    scales = top * np.float32(1 / steps)
    return QuantizedRows(whole, scales, scales * whole.sum(-1).astype(np.float32))


def product(weight: QTensor, x: Floats, planes: int, there: Floats | None = None) -> Floats:
    """x [rows, columns] times a weight transposed, added to what is there, float32 [rows, outputs]."""
    start = np.zeros((len(x), weight.shape[0]), np.float32) if there is None else there
    if isinstance(weight, PlainTensor):
        return _plain_product(weight.values.float().numpy(), x, start)
    return _affine_product(weight, quantize(x, planes), start)


def _affine_product(weight: AffineTensor, rows: QuantizedRows, total: Floats) -> Floats:
    """Groups one after another, each with an exact integer sum. Codes are unsigned, as the instruction wants them."""
    codes, zero = unpack_codes(weight).numpy().astype(np.int64), weight.zero
    if weight.bits == 8:
        codes, zero = codes + 128, 128
    codes = codes.reshape(weight.shape[0], -1, GROUP)
    scales = weight.scales.numpy().astype(np.float32)
    least = scales * np.float32(-zero) if weight.minimums is None else -weight.minimums.numpy().astype(np.float32)
    for g in range(codes.shape[1]):
        sums = (rows.whole[:, g] @ codes[:, g].T).astype(np.float32)
        total = fma(sums, scales[:, g] * rows.scales[:, g, None], total)
        total = fma(least[:, g], rows.sums[:, g, None], total)
    return total


def _plain_product(values: Floats, x: Floats, there: Floats) -> Floats:
    """Two chains, over the even and the odd columns."""
    chains = np.zeros((2, len(x), len(values)), np.float32)
    for column in range(x.shape[1]):
        chains[column % 2] = fma(values[:, column], x[:, column, None], chains[column % 2])
    total: Floats = chains[0] + chains[1] + there
    return total
