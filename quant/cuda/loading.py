"""Copy canonical weights to a GPU and rearrange them there, once, when a model loads.

Codes and scales are neither rounded nor multiplied. Floats are rounded to the type that products need. Weights are
rearranged a slab of rows at a time, so that little memory is needed besides the result's.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from quant.cuda import float8
from quant.cuda.matrix import (
    DENSE,
    THREADS,
    TILE_ROWS,
    WHOLE_ROW,
    WORDS,
    CudaMatrix,
    PackedForm,
    PackedMatrix,
    PlainMatrix,
)
from quant.errors import UnsupportedQuantization
from quant.linear import Use
from quant.tensor import (
    CodedTensor,
    Float8Tensor,
    GroupedTensor,
    Integers,
    NestedScale,
    PlainTensor,
    QTensor,
    Scale,
)

SLAB = 1 << 22  # number of codes that are rearranged at once
SLAB_BYTES = 12 * SLAB  # bytes of temporary memory for a slab: codes, the same padded, and two 32-bit integers for each
LEAST_GROUP = 16  # columns of a matrix instruction; the group size must be a multiple of it


def to_device(weight: QTensor, device: torch.device, use: Use = Use.PRODUCTS) -> CudaMatrix:
    """Return `weight` on `device`, or in pinned memory of the host, which kernels of a GPU can read, if `use` says so.

    Raises UnsupportedQuantization for a group size that no kernel supports.
    """
    if Use.HOST in use:
        matrix = to_device(weight, torch.device("cpu"), use & ~Use.HOST)
        return _pinned(matrix, device) if device.type == "cuda" else matrix
    if isinstance(weight, PlainTensor):
        return _plain(weight.values, device, use)
    if isinstance(weight, Float8Tensor):
        return float8.to_device(weight, device)
    if isinstance(weight, CodedTensor):
        return _coded(weight, device)
    return _grouped(weight, device)


def _pinned(matrix: CudaMatrix, device: torch.device) -> CudaMatrix:
    """Return a matrix whose rows are in pinned memory of the host, and whose tables are on the device."""
    tensors = {it.name: getattr(matrix, it.name) for it in fields(matrix)}
    moved: dict[str, Any] = {
        name: tensor.pin_memory() if name in matrix.row_tensors else tensor.to(device)
        for name, tensor in tensors.items()
        if isinstance(tensor, Tensor)
    }
    return replace(matrix, **moved)


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
            minimum is not None,
            nibbles,
        ),
        weight,
    )
    low, high = _codes(weight.codes, form, device)
    both = [scale] if minimum is None else [scale, minimum]
    sub_scales = [_values(it.sub_scales, device) for it in both if it.sub_scales is not None]
    if nibbles:
        sub_scales = [sub_scales[0] | sub_scales[1] << 4]
    return PackedMatrix(
        weight.shape,
        form,
        low,
        high,
        _arranged([it.block_factors().to(device) for it in both], form, form.group * form.ratio),
        _arranged(sub_scales, form, form.group) if sub_scales else None,
        numbers=_numbers(weight.table, device),
        number_pairs=_number_pairs(weight.table, device),
        number_integers=_number_integers(form, device),
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
        scale.block_scales.to(device)
        if isinstance(scale, NestedScale)
        else _arranged([scale.factors().to(device)], form, form.group),
        _arranged([nested.codes.to(device)], form, form.group) if nested else None,
        zeros=_arranged([_values(zero, device)[:, : weight.groups]], form, form.group)
        if isinstance(zero, Integers)
        else None,
        numbers=_numbers(weight.table, device),
        number_pairs=_number_pairs(weight.table, device),
        number_integers=_number_integers(form, device),
        scale_table=nested.table.to(device) if nested else None,
        order=None if weight.order is None else weight.order.to(device),
    )


def _checked(form: PackedForm, weight: CodedTensor | GroupedTensor) -> PackedForm:
    """Return the form of `weight`. A single group gets the size WHOLE_ROW. Raises the errors of `to_device`."""
    if form.groups == 1:
        return replace(form, group=WHOLE_ROW)
    if form.group % LEAST_GROUP:
        raise UnsupportedQuantization(
            f"The GPU kernels do not support {weight.type_name} weights in groups of {form.group} columns: "
            f"the group size must be a multiple of {LEAST_GROUP}",
            "Use the CPU: --device cpu.",
        )
    return form


def _plane_bits(integers: Integers) -> tuple[int, ...]:
    bits = tuple(plane.bits for plane in integers.planes)
    return (WORDS, WORDS) if bits == (8,) else bits


def _codes(integers: Integers, form: PackedForm, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return the words of both planes of the codes."""
    first, *second = integers.planes
    rows = len(first.data)
    shape = -(-rows // TILE_ROWS), form.tiles, TILE_ROWS, THREADS
    low, *rest = (torch.empty(*shape, bits, dtype=torch.int32, device=device) for bits in form.planes)
    step = max(1, SLAB // form.width // TILE_ROWS)
    for at in range(0, len(low), step):
        some = slice(at * TILE_ROWS, (at + step) * TILE_ROWS)
        codes = _unpacked(first.data[some].to(device), first.bits)
        low[at : at + step] = _words(codes & 0xF, form.planes[0], form)
        for high in rest:
            codes = _unpacked(second[0].data[some].to(device), second[0].bits) if second else codes >> WORDS
            high[at : at + step] = _words(codes, form.planes[1], form)
    return low, rest[0] if rest else None


def _words(codes: Tensor, bits: int, form: PackedForm) -> Tensor:
    """Return the words of a plane, int32 [rows / 8, tiles, 8, 4, bits], of codes [rows, at least `form.columns`]."""
    codes = codes[:, : form.columns]
    padded = F.pad(codes, (0, form.width - form.columns, 0, -len(codes) % TILE_ROWS))
    # axes of a column: words that share one, halves of a word's codes, threads, pairs, and elements of a pair
    order = (0, 2, 1, 5, 3, 4, 6, 7, 8) if form.run == 8 else (0, 2, 1, 6, 3, 4, 5, 7, 8)
    halves = (THREADS, 2) if form.run == 8 else (2, THREADS)
    parts = padded.view(-1, TILE_ROWS, form.tiles, bits, WORDS // bits, *halves, 2, 2).permute(order).int()
    places = [torch.arange(n, dtype=torch.int32, device=codes.device) for n in (WORDS // bits, 2, 2, 2)]
    share, half, pair, element = (it.view(-1, *[1] * (3 - index)) for index, it in enumerate(places))
    shifts = share * bits + half * 8 + pair * 4 + element * 16
    return (parts << shifts).sum((-4, -3, -2, -1), dtype=torch.int32)


def _arranged(parts: Sequence[Tensor], form: PackedForm, group: int) -> Tensor:
    """Return numbers of groups, each [rows, groups], as [rows / 8, chunks, 8, groups of a chunk, parts]."""
    rows, groups = parts[0].shape
    chunks, per_chunk = form.chunks(group)
    padded = F.pad(torch.stack(tuple(parts), -1), (0, 0, 0, chunks * per_chunk - groups, 0, -rows % TILE_ROWS))
    return padded.view(-1, TILE_ROWS, chunks, per_chunk, len(parts)).transpose(1, 2).contiguous()


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


def _has_nibbles(scale: Scale) -> bool:
    return scale.sub_scales is not None and scale.sub_scales.bits == 4


def _numbers(table: tuple[float, ...] | None, device: torch.device) -> Tensor | None:
    return None if table is None else torch.tensor(table, dtype=torch.float32, device=device)


def _number_pairs(table: tuple[float, ...] | None, device: torch.device) -> Tensor | None:
    return None if table is None else _pairs(torch.tensor(table).bfloat16()).view(torch.int32).flatten().to(device)


def _number_integers(form: PackedForm, device: torch.device) -> Tensor | None:
    integers, _ = form.integer_table
    return _pairs(torch.tensor(integers, dtype=torch.int8)).view(torch.int16).flatten().to(device) if integers else None


def _pairs(table: Tensor) -> Tensor:
    """Return the values of pairs of codes, [256, 2]: at a + 16 * b those of the codes a and b."""
    values = F.pad(table, (0, 16 - len(table)))
    return torch.stack((values.repeat(16), values.repeat_interleave(16)), 1)
