"""Random weights of every canonical kind, in any size, on any device.

The host creates a small number of rows in the file format, and the device repeats them, so that the host has little to
compute. On the device `meta`, tensors have only shapes.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from quant.ggml_blocks import BLOCKS, PLAIN_TYPES, decode
from quant.ggml_types import GGMLType, ggml_types
from quant.kernels.reference import dequantize
from quant.tensor import (
    CodedTensor,
    Float8Tensor,
    GroupedTensor,
    GroupScale,
    Integers,
    NestedScale,
    PlainTensor,
    QTensor,
    Scale,
)
from tests.quant.cpu.random_group_weights import GROUP_TYPES, ORDERED

ROWS = 128  # number of distinct rows; a multiple of the rows that share a scale
DEVIATION = 0.02  # standard deviation of GGUF weights
KINDS = (*PLAIN_TYPES, *BLOCKS, *GROUP_TYPES, *ORDERED)

_Move = Callable[[Tensor, int], Tensor]  # repeats the rows of a tensor to a number of rows, on the device


def fits(kind: str, *columns: int) -> bool:
    """Whether matrices of the kind can have these numbers of columns."""
    return kind not in BLOCKS or all(it % _ggml(kind).block_elements == 0 for it in columns)


def weight(kind: str, rows: int, columns: int, device: torch.device) -> QTensor:
    """Make a matrix of one of KINDS."""

    def move(tensor: Tensor, count: int) -> Tensor:
        on_device = tensor.to(device)
        return on_device.repeat(-(-count // len(on_device)), *[1] * (on_device.dim() - 1))[:count]

    return _repeat_rows(_sample(kind, columns), rows, move)


@cache
def _sample(kind: str, columns: int) -> QTensor:
    rng = np.random.default_rng(columns)
    if kind in PLAIN_TYPES:
        values = torch.from_numpy(rng.standard_normal((ROWS, columns), np.float32)) * DEVIATION
        return PlainTensor((ROWS, columns), kind, values.to(PLAIN_TYPES[kind]))
    if kind in BLOCKS:
        return _ggml_weight(kind, columns, rng)
    return {**GROUP_TYPES, **ORDERED}[kind].make(ROWS, columns, rng)


def _ggml(kind: str) -> GGMLType:
    return next(it for it in ggml_types().values() if it.name == kind)


def _ggml_weight(kind: str, columns: int, rng: np.random.Generator) -> QTensor:
    """Make random blocks, with scales such that the values have the right deviation and a mean close to zero."""
    ggml = _ggml(kind)
    data = bytearray(rng.bytes(ggml.nbytes(ROWS * columns)))
    coded = decode(ggml, memoryview(data), (ROWS, columns))
    assert isinstance(coded, CodedTensor)
    if coded.scale.block_scales.dtype == torch.uint8:  # exponents
        return replace(coded, scale=replace(coded.scale, block_scales=torch.full_like(coded.scale.block_scales, 119)))
    signs = torch.from_numpy(rng.choice((-1.0, 1.0), tuple(coded.scale.block_scales.shape)).astype(np.float16))
    units = torch.ones_like(signs) if coded.minimum else signs
    deviation = float(dequantize(_with_scales(coded, units)).std())
    return _with_scales(coded, (units * DEVIATION / deviation).half())


def _with_scales(coded: CodedTensor, whole: Tensor) -> CodedTensor:
    mean = ((1 << coded.codes.bits) - 1) / 2
    minimum = replace(coded.minimum, block_scales=(whole * mean).half()) if coded.minimum else None
    return replace(coded, scale=replace(coded.scale, block_scales=whole), minimum=minimum)


def _repeat_rows(sample: QTensor, rows: int, move: _Move) -> QTensor:
    shape = (rows, sample.shape[1])
    match sample:
        case PlainTensor():
            return PlainTensor(shape, sample.type_name, move(sample.values, rows))
        case CodedTensor():
            return replace(
                sample,
                shape=shape,
                codes=_integers(sample.codes, rows, move),
                scale=_scale(sample.scale, rows, move),
                minimum=_scale(sample.minimum, rows, move) if sample.minimum else None,
            )
        case Float8Tensor():
            height = rows if len(sample.scale) == 1 and sample.block[0] == ROWS else sample.block[0]
            scales = move(sample.scale, -(-rows // height))
            return Float8Tensor(shape, sample.type_name, move(sample.values, rows), scales, (height, sample.block[1]))
        case GroupedTensor():
            zero = _integers(sample.zero, rows, move) if isinstance(sample.zero, Integers) else sample.zero
            factors = _factors(sample.scale, rows, sample.groups, move)
            return replace(sample, shape=shape, codes=_integers(sample.codes, rows, move), scale=factors, zero=zero)


def _integers(integers: Integers, rows: int, move: _Move) -> Integers:
    return Integers(tuple(replace(plane, data=move(plane.data, rows)) for plane in integers.planes))


def _scale(scale: Scale, rows: int, move: _Move) -> Scale:
    sub_scales = _integers(scale.sub_scales, rows, move) if scale.sub_scales else None
    return replace(scale, block_scales=move(scale.block_scales, rows), sub_scales=sub_scales)


def _factors(scale: GroupScale | NestedScale, rows: int, groups: int, move: _Move) -> GroupScale | NestedScale:
    if isinstance(scale, GroupScale):
        return replace(scale, stored=move(scale.stored, rows))
    blocks = -(-rows * groups // scale.block_size)
    codes, table = move(scale.codes, rows), move(scale.table, len(scale.table))
    return replace(scale, codes=codes, table=table, block_scales=move(scale.block_scales, blocks))
