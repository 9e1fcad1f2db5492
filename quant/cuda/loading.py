"""Copy canonical weights to a GPU and rearrange them there, once, when a model loads.

Codes and scales are neither rounded nor multiplied. Floats are rounded to the type that products need. Weights are
rearranged a slab of rows at a time, so that little memory is needed besides the result's.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from quant.cuda import float8
from quant.cuda.matrix import DENSE, TILE_FRAGMENTS, TILE_ROWS, WORDS, CudaMatrix, PackedForm, PackedMatrix, PlainMatrix
from quant.errors import UnsupportedQuantization
from quant.linear import Use
from quant.tensor import (
    CodedTensor,
    Float8Tensor,
    GroupedTensor,
    Integers,
    NestedScale,
    PlainTensor,
    Plane,
    QTensor,
    Scale,
)

SLAB = 1 << 22  # number of codes that are rearranged at once
SLAB_BYTES = 12 * SLAB  # bytes of temporary memory for a slab: codes, the same padded, and two 32-bit integers for each
HALF_FRAGMENT = 16  # columns; the group size must be a multiple of it
INTEGERS = {64: torch.int64, 32: torch.int32, 16: torch.int16}  # integer types by their number of bits


def to_device(weight: QTensor, device: torch.device, use: Use = Use.PRODUCTS) -> CudaMatrix:
    """Return `weight` on `device`. Raises UnsupportedQuantization for a group size that no kernel supports."""
    if isinstance(weight, PlainTensor):
        return _plain(weight.values, device, use)
    if isinstance(weight, Float8Tensor):
        return float8.to_device(weight, device)
    if isinstance(weight, CodedTensor):
        return _coded(weight, device)
    return _grouped(weight, device)


def _plain(values: Tensor, device: torch.device, use: Use) -> PlainMatrix:
    """Convert floats to the type of products. Keep a copy in the file's type if single rows are also read.

    The conversion runs on the host, so that it takes no GPU memory.
    """
    if values.dtype == DENSE or Use.PRODUCTS not in use:
        return PlainMatrix(values.to(device))
    return PlainMatrix(values.to(DENSE).to(device), values.to(device) if Use.ROWS in use else None)


def _coded(weight: CodedTensor, device: torch.device) -> PackedMatrix:
    scale, minimum = weight.scale, weight.minimum
    nibbles = _has_nibbles(scale) and minimum is not None and _has_nibbles(minimum)
    form = _checked(
        PackedForm(
            weight.shape[1],
            weight.group,
            _plane_bits(weight.codes),
            weight.zero,
            weight.table,
            scale.sub_scale_zero,
            weight.shape[1] // weight.group // max(1, scale.block_scales.shape[1]),
            nibbles,
        ),
        weight,
    )
    low, high = _codes(weight.codes, form, device)
    sub_scales, sub_minimums = _sub_scales(scale, device), None if minimum is None else _sub_scales(minimum, device)
    if nibbles and sub_scales is not None and sub_minimums is not None:
        sub_scales, sub_minimums = sub_scales | sub_minimums << 4, None
    return PackedMatrix(
        weight.shape,
        form,
        low,
        high,
        scale.block_factors().to(device),
        sub_scales,
        None if minimum is None else minimum.block_scales.to(device),
        sub_minimums,
        numbers=_numbers(weight.table, device),
    )


def _grouped(weight: GroupedTensor, device: torch.device) -> PackedMatrix:
    scale, zero = weight.scale, weight.zero
    nested = scale if isinstance(scale, NestedScale) else None
    form = PackedForm(
        weight.shape[1],
        weight.group,
        _plane_bits(weight.codes),
        zero if isinstance(zero, int) else 0,
        weight.table,
        nested_block=nested.block_size if nested else 0,
        scale_offset=nested.offset if nested else 0.0,
    )
    form = _checked(form, weight)
    low, high = _codes(weight.codes, form, device)
    return PackedMatrix(
        weight.shape,
        form,
        low,
        high,
        (scale.block_scales if isinstance(scale, NestedScale) else scale.factors()).to(device),
        nested.codes.to(device) if nested else None,
        zeros=_values(zero, device)[:, : weight.groups].contiguous() if isinstance(zero, Integers) else None,
        numbers=_numbers(weight.table, device),
        scale_table=nested.table.to(device) if nested else None,
        order=None if weight.order is None else weight.order.to(device),
    )


def _checked(form: PackedForm, weight: CodedTensor | GroupedTensor) -> PackedForm:
    """Return the form of `weight`. A single group is widened to the padded width. Raises the errors of `to_device`."""
    if form.groups == 1:
        return replace(form, group=form.width)
    if form.group % HALF_FRAGMENT:
        raise UnsupportedQuantization(
            f"The GPU kernels do not support {weight.type_name} weights in groups of {form.group} columns: "
            f"the group size must be a multiple of {HALF_FRAGMENT}",
            "Use the CPU: --device cpu.",
        )
    return form


def _plane_bits(integers: Integers) -> tuple[int, ...]:
    return tuple(plane.bits for plane in integers.planes)


def _codes(integers: Integers, form: PackedForm, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return both planes of the codes, the first as words and the second as fragments."""
    first, *second = integers.planes
    rows, wide = len(first.data), form.codes_per_word * first.bits
    shape = -(-rows // TILE_ROWS), form.tiles, TILE_ROWS, TILE_FRAGMENTS
    low = torch.empty(*shape, WORDS, dtype=INTEGERS[wide], device=device)
    high = (
        torch.empty(shape, dtype=INTEGERS[wide * WORDS * form.planes[1] // first.bits], device=device)
        if second
        else None
    )
    step = max(1, SLAB // form.width // TILE_ROWS)
    for at in range(0, len(low), step):
        some = slice(at * TILE_ROWS, (at + step) * TILE_ROWS)
        low[at : at + step] = _words(first, some, form, device).to(low.dtype)
        if high is not None:
            high[at : at + step] = _fragments(_words(second[0], some, form, device), form).to(high.dtype)
    return low, high


def _words(plane: Plane, rows: slice, form: PackedForm, device: torch.device) -> Tensor:
    """Return rows of a plane as int32 [rows / 8, tiles, 8, 4, 4], with each code at its bit position in the first
    plane.
    """
    codes = _unpacked(plane.data[rows].to(device), plane.bits)[:, : form.columns]
    padded = F.pad(codes, (0, form.width - form.columns, 0, -len(codes) % TILE_ROWS))
    tiles = padded.view(-1, TILE_ROWS, form.tiles, TILE_FRAGMENTS, form.codes_per_word, WORDS).transpose(1, 2).int()
    shifts = form.planes[0] * torch.arange(form.codes_per_word, dtype=torch.int32, device=device).view(-1, 1)
    return (tiles << shifts).sum(-2, dtype=torch.int32)


def _fragments(words: Tensor, form: PackedForm) -> Tensor:
    """Combine words of the second plane, int32 [..., 4], into fragments, int64 [...]."""
    low, high = form.planes
    word, share = torch.arange(WORDS, device=words.device), low // high
    return (words.long() << word // share * (form.codes_per_word * low) + word % share * high).sum(-1)


def _unpacked(data: Tensor, bits: int) -> Tensor:
    """Return the integers in a plane's bytes, uint8 [rows, integers]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=data.device).view(-1, 1)
    return ((data.view(len(data), -1, 1, 4) >> shifts) & ((1 << bits) - 1)).flatten(1)


def _values(integers: Integers, device: torch.device) -> Tensor:
    """Return the integers, combined from all planes, uint8 [rows, count]."""
    values, shift = torch.zeros(integers.shape, dtype=torch.uint8, device=device), 0
    for plane in integers.planes:
        values |= _unpacked(plane.data.to(device), plane.bits) << shift
        shift += plane.bits
    return values


def _sub_scales(scale: Scale, device: torch.device) -> Tensor | None:
    return None if scale.sub_scales is None else _values(scale.sub_scales, device)


def _has_nibbles(scale: Scale) -> bool:
    return scale.sub_scales is not None and scale.sub_scales.bits == 4


def _numbers(table: tuple[float, ...] | None, device: torch.device) -> Tensor | None:
    return None if table is None else torch.tensor(table, dtype=torch.float32, device=device)
