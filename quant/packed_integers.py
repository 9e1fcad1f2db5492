"""Convert integers of 2, 4, or 8 bits in 32-bit words, as checkpoints pack them, to planes of the canonical form.

Element i of a word is at bit i * bits. Also computes the order of columns from the groups that `act_order` checkpoints
store (g_idx).
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quant.ggml_blocks import SLAB, integers
from quant.tensor import Integers, Plane

Bytes = NDArray[np.uint8]

WIDTHS = (2, 4, 8)
ROWS = 8  # the number of rows in a slab is a multiple of this, except in the last slab


def unpack(words: Tensor, bits: int) -> Bytes:
    """Unpack int32 words [..., n], the lowest bits first, to uint8 [..., n * 32 / bits]."""
    data = np.ascontiguousarray(words.numpy()).astype("<i4", copy=False).view(np.uint8)
    per_byte = 8 // bits
    out = np.empty((*data.shape[:-1], data.shape[-1] * per_byte), np.uint8)
    for index in range(per_byte):
        np.bitwise_and(data >> np.uint8(bits * index), np.uint8((1 << bits) - 1), out=out[..., index::per_byte])
    return out


def words(values: Bytes, bits: int) -> Tensor:
    """Pack values below 2 ** bits [rows, n] to int32 words [rows, n * bits / 32, rounded up], padded with zeros."""
    per_byte = 8 // bits
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % (32 // bits))))
    data = np.zeros((len(values), padded.shape[1] // per_byte), np.uint8)
    for index in range(per_byte):
        data |= padded[:, index::per_byte] << np.uint8(bits * index)
    return torch.from_numpy(data.view("<i4").astype(np.int32, copy=False))


def pack(shape: tuple[int, int], bits: int, values: Callable[[slice], Bytes]) -> Integers:
    """Pack integers of `shape`, below 2 ** bits, in one plane. Rows are padded with zeros to whole words.

    `values` returns the integers of some rows. It is called for a slab at a time, so that intermediate results are
    small.
    """
    rows, count = shape
    padding = -count % (32 // bits)
    data = np.empty((rows, (count + padding) * bits // 8), np.uint8)
    step = max(1, SLAB // count // ROWS) * ROWS
    for first in range(0, rows, step):
        some = slice(first, min(first + step, rows))
        (plane,) = integers(np.pad(values(some), ((0, 0), (0, padding))), (bits,)).planes
        data[some] = plane.data.numpy()
    return Integers((Plane(bits, torch.from_numpy(data)),))


def columns_by_group(g_idx: Tensor, group: int) -> Tensor | None:
    """Return the column indices sorted by group, int32 [columns], or None if they are already sorted.

    Every group has `group` columns; the last one may have fewer. Raises ValueError for any other sizes.
    """
    columns = len(g_idx)
    groups = -(-columns // group)
    lowest, highest = int(g_idx.min()), int(g_idx.max())
    if lowest < 0 or highest >= groups:
        raise ValueError(f"refers to group {lowest if lowest < 0 else highest} of {groups}")
    counts = torch.bincount(g_idx, minlength=groups)
    expected = torch.full((groups,), group)
    expected[-1] = columns - group * (groups - 1)
    if not torch.equal(counts, expected):
        wrong = int((counts != expected).nonzero()[0])
        raise ValueError(f"puts {int(counts[wrong])} columns into group {wrong} instead of {int(expected[wrong])}")
    order = torch.argsort(g_idx, stable=True)
    return None if torch.equal(order, torch.arange(columns)) else order.int()
