"""The arithmetic of the CPU kernels in numpy: the same integers, roundings, and order of operations.

This oracle determines every bit. It has no tiles, lanes, or threads, because results must not depend on them.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quant.cpu.activations import Form
from quant.cpu.tiers import choose
from quant.tensor import CodedTensor, Float8Tensor, GroupedTensor, Integers, PlainTensor, QTensor, Scale

GROUP, SUPER_BLOCK = 32, 256
Floats = NDArray[np.float32]


def fused(x: Any, y: Any, z: Any) -> Floats:
    """Return x * y + z of float32 arrays, rounded once.

    The product is exact in float64. The sum with z is rounded to odd in float64, so that the rounding to float32 can
    tell on which side of a tie the exact sum is (Boldo and Melquiond, 2008).
    """
    product, z = np.float64(x) * np.float64(y), np.float64(z)
    total = np.asarray(product + z)
    back = total - product
    error = (product - (total - back)) + (z - back)
    even = total.view(np.int64) & 1 == 0
    odd = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where((error != 0) & even, odd, total).astype(np.float32)


def rounded_twice(x: Any, y: Any, z: Any) -> Floats:
    """Return x * y + z of float32 arrays, rounded after each operation, as without fused multiply-adds."""
    return np.asarray(np.float32(x) * np.float32(y) + np.float32(z))


fma = fused if choose("auto").has("fma", "neon") else rounded_twice


@dataclass(frozen=True)
class QuantizedRows:
    """Rows of activations as integers, [rows, groups, columns], with a scale and scale * sum for each group."""

    numbers: NDArray[np.int64]
    scales: Floats
    sums: Floats
    firsts: Floats  # scale * sum of the first 16 columns


def quantize(x: Floats, form: Form) -> QuantizedRows:
    """Quantize x [rows, columns]. A group has 32 columns, or 256 in super-blocks.

    The step is the largest magnitude of the group divided by 127, or by 16256 for 14 bits.
    """
    groups = x.reshape(len(x), -1, SUPER_BLOCK if form is Form.SUPER_BLOCKS else GROUP)
    steps = 127 * 128 if form is Form.BITS_14 else 127
    top = np.abs(groups).max(-1)
    with np.errstate(divide="ignore"):
        inverse = np.where(top > 0, np.float32(steps) / top, np.float32(0))
    numbers = np.rint(groups * inverse[..., None]).astype(np.int64)
    scales = top * np.float32(1 / steps)
    firsts = scales * numbers[..., : GROUP // 2].sum(-1).astype(np.float32)
    return QuantizedRows(numbers, scales, scales * numbers.sum(-1).astype(np.float32), firsts)


def product(weight: QTensor, x: Floats, form: Form, addend: Floats | None = None) -> Floats:
    """Return x [rows, columns] times the transposed weight, plus `addend`, float32 [rows, outputs]."""
    start = np.zeros((len(x), weight.shape[0]), np.float32) if addend is None else addend
    if isinstance(weight, Float8Tensor):
        height, width = weight.block
        rows = torch.arange(weight.shape[0]) // height
        scale = weight.scale.float()[rows].numpy()
        return _float_product(weight.values.float().numpy(), _by_group(scale, width, x), x, start)
    if isinstance(weight, GroupedTensor):
        x = x if weight.order is None else x[:, weight.order.numpy()]
        scale = _by_group(weight.scale.values().numpy(), weight.group, x)
        codes = weight.codes.values().numpy().astype(np.int64)
        if weight.table is not None:
            return _float_product(np.array(weight.table, np.float32)[codes], scale, x, start)
        zeros = weight.zero.values().numpy()[:, : weight.groups] if isinstance(weight.zero, Integers) else weight.zero
        numbers = codes - (zeros if isinstance(zeros, int) else np.repeat(zeros, weight.group, 1)[:, : codes.shape[1]])
        return _group_product(numbers, scale, quantize(x, form), start)
    if isinstance(weight, PlainTensor):
        return _plain_product(weight.values.float().numpy(), x, start)
    multiply = _super_block_product if form is Form.SUPER_BLOCKS else _coded_product
    return multiply(weight, quantize(x, form), start)


def _numbers(weight: CodedTensor) -> NDArray[np.int64]:
    """Return the integers that the codes represent, [rows, columns]."""
    codes = weight.codes.values().numpy().astype(np.int64)
    numbers = codes - weight.zero if weight.table is None else np.array(weight.table, np.int64)[codes]
    return numbers.reshape(weight.shape)


def _super_block_product(weight: CodedTensor, rows: QuantizedRows, total: Floats) -> Floats:
    """Add super-blocks in order. Each has an exact sum of codes and one of minimums, times integer sub-scales."""
    blocks = weight.shape[1] // SUPER_BLOCK
    numbers = _numbers(weight).reshape(-1, blocks, SUPER_BLOCK)
    scales, sub_scales = _block_and_sub_scales(weight.scale, blocks)
    minimums = None if weight.minimum is None else _block_and_sub_scales(weight.minimum, blocks)
    for s in range(blocks):
        x_numbers = rows.numbers[:, s]
        products = x_numbers[:, None] * numbers[None, :, s]
        sums = products.reshape(len(x_numbers), len(numbers), sub_scales.shape[2], -1).sum(-1)
        found = (sums * sub_scales[:, s]).sum(-1).astype(np.float32) * scales[:, s]
        if minimums is not None:
            sums = x_numbers.reshape(len(x_numbers), minimums[1].shape[2], -1).sum(-1)
            found = fma((sums @ minimums[1][:, s].T).astype(np.float32), -minimums[0][:, s], found)
        total = fma(found, rows.scales[:, s, None], total)
    return total


def _block_and_sub_scales(scale: Scale, blocks: int) -> tuple[Floats, NDArray[np.int64]]:
    """Return the float scale of each super-block, [rows, blocks], and its integer sub-scales, [rows, blocks, n]."""
    block_scales = scale.block_scales.float().numpy()
    if scale.sub_scales is None:
        return block_scales, np.ones((*block_scales.shape, 1), np.int64)
    sub_scales = scale.sub_scales.values().numpy().astype(np.int64) - scale.sub_scale_zero
    return block_scales, sub_scales.reshape(len(block_scales), blocks, -1)


def _coded_product(weight: CodedTensor, rows: QuantizedRows, total: Floats) -> Floats:
    """Add groups, or halves of groups, in order. Each has an exact integer sum."""
    size = min(weight.group, GROUP)
    numbers = _numbers(weight).reshape(weight.shape[0], -1, size)
    x_numbers = rows.numbers.reshape(len(rows.numbers), -1, size)
    scales, halves = _for_each(weight.scale, weight.group), GROUP // size
    minimums = None if weight.minimum is None else _for_each(weight.minimum, weight.group)
    for g in range(numbers.shape[1]):
        group, half = divmod(g, halves)
        sums = (x_numbers[:, g] @ numbers[:, g].T).astype(np.float32)
        total = fma(sums, scales[:, g] * rows.scales[:, group, None], total)
        if minimums is not None:
            x_sums = rows.sums[:, group] if halves == 1 else rows.firsts[:, group]
            x_sums = rows.sums[:, group] - rows.firsts[:, group] if half else x_sums
            total = fma(-minimums[:, g], x_sums[:, None], total)
    return total


def _by_group(scales: Floats, columns: int, x: Floats) -> Floats:
    """Return the scale for every 32 columns of a row, from scales of `columns` columns each."""
    return scales[:, np.arange(0, x.shape[1], GROUP) // columns]


def _group_product(numbers: NDArray[np.int64], scales: Floats, rows: QuantizedRows, total: Floats) -> Floats:
    """Add groups of 32 columns in order. Each has an exact integer sum."""
    numbers = numbers.reshape(len(numbers), -1, GROUP)
    for g in range(numbers.shape[1]):
        sums = (rows.numbers[:, g] @ numbers[:, g].T).astype(np.float32)
        total = fma(sums, scales[:, g] * rows.scales[:, g, None], total)
    return total


def _float_product(values: Floats, scales: Floats, x: Floats, total: Floats) -> Floats:
    """Add groups of 32 columns in order. Each has two chains, over the even and the odd columns."""
    for g in range(scales.shape[1]):
        chains: list[Floats] = []
        for column in range(GROUP * g, GROUP * (g + 1)):
            weights, numbers = values[:, column], x[:, column, None]
            chains.append(weights * numbers if len(chains) < 2 else fma(weights, numbers, chains[-2]))
        total = fma(chains[-2] + chains[-1], scales[:, g], total)
    return total


def _for_each(scale: Scale, columns: int) -> Floats:
    """Repeat scales that cover `columns` columns each for every 32 columns."""
    values: Floats = np.repeat(scale.values().numpy(), max(1, columns // GROUP), axis=1)
    return values


def _plain_product(values: Floats, x: Floats, addend: Floats) -> Floats:
    """Return x @ values.T + addend, with one chain of FMAs for the even columns and one for the odd columns."""
    chains = np.zeros((2, len(x), len(values)), np.float32)
    for column in range(x.shape[1]):
        chains[column % 2] = fma(values[:, column], x[:, column, None], chains[column % 2])
    total: Floats = chains[0] + chains[1] + addend
    return total
