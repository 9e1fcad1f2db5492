"""Dequantize one row of a weight in tiles to float32, for embedding look-ups.

Results are rounded as in `quant.kernels.reference`. A row is small, so nothing here is tuned.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from quant.cpu.float16 import widen
from quant.cpu.ggml_decoding import each_group, load_codes, load_scales
from quant.cpu.ggml_formats import GGML_FORMATS, GROUP, HALF, SINGLE, TILE, GGMLFormat
from quant.cpu.group_decoding import columns_of_vector, each_scale_group, load_floats
from quant.cpu.group_formats import GROUP_FORMATS, GroupFormat
from quant.cpu.kernel import inlined, jit, kernel
from quant.cpu.layouts import Layout
from quant.cpu.vector import F16, F32, I32, I64, Emit, F32x16, I8x16, I32x16


def _numbers_of(e: Emit, layout: GGMLFormat, at: Any, lane: Any) -> list[Any]:
    """Return the integers in columns 0 to 15 and 16 to 31 of the group, as two int32 vectors."""
    halves = []
    for half in range(2):
        four = ir.Constant(ir.VectorType(I32, 4), ir.Undefined)
        for index in range(4):
            # Decode the whole vector and take the lane's word: slow, but it decodes as the products do.
            codes = e.b.bitcast(load_codes(e, layout, at, 4 * half + index), I32x16)
            four = e.b.insert_element(four, e.b.extract_element(codes, lane), I32(index))
        halves.append(e.b.zext(e.b.bitcast(four, I8x16), I32x16))
    return halves


def _make_coded_row(layout: GGMLFormat) -> Callable[..., None]:
    def coded_row(e: Emit, w: Any, groups: Any, lane: Any, out: Any) -> None:
        b, lane_number = e.b, e.b.trunc(lane, I32)
        with each_group(e, layout, groups, [w]) as (g, (at,), (head,)):
            scales = load_scales(e, layout, at, head, g)
            for half, numbers in enumerate(_numbers_of(e, layout, at, lane_number)):
                scale, minimum = scales[half % len(scales)]
                whole = b.sitofp(b.sub(numbers, e.i(layout.zero if minimum is None else 0)), F32x16)
                values = b.fmul(e.splat(b.extract_element(scale, lane_number)), whole)
                if minimum is not None:
                    values = b.fadd(values, e.splat(b.extract_element(minimum, lane_number)))
                e.store(e.at(e.at(out, g, 4 * GROUP), 64 * half), values)

    coded_row.__name__ = f"coded_row_{layout.number}"
    return kernel(coded_row, layout.part)


def _make_group_row(layout: GroupFormat) -> Callable[..., None]:
    def write_integers(e: Emit, at: Any, lane: Any, scale: Any, zeros: list[Any], out: Any) -> None:
        zero = zeros[0] if zeros else e.i(layout.codes.zero)
        for half, numbers in enumerate(_numbers_of(e, layout.codes, at, lane)):
            whole = e.b.sitofp(e.b.sub(numbers, zero), F32x16)
            e.store(e.at(out, 64 * half), e.b.fmul(e.splat(scale), whole))

    def write_floats(e: Emit, at: Any, lane: Any, scale: Any, out: Any) -> None:
        width = columns_of_vector(layout)
        for vector in range(GROUP // width):
            for index, column in enumerate(load_floats(e, layout, at, vector)):
                value = e.b.fmul(scale, e.b.extract_element(column, lane))
                e.store(e.at(out, 4 * (width * vector + index)), value)

    def group_row(e: Emit, w: Any, groups: Any, lane: Any, out: Any) -> None:
        b, lane = e.b, e.b.trunc(lane, I32)
        with each_scale_group(e, layout, groups, [w]) as scale_group:
            scale = b.extract_element(scale_group.scales()[0], lane)
            zeros = [e.splat(b.extract_element(it, lane)) for it in scale_group.zeros()]
            with scale_group.each_group() as (g, (at,)):
                to = e.at(out, g, 4 * GROUP)
                if layout.floats:
                    write_floats(e, at, lane, scale, to)
                else:
                    write_integers(e, at, lane, scale, zeros, to)

    group_row.__name__ = f"{'float' if layout.floats else 'coded'}_group_row_{layout.number}"
    return kernel(group_row, layout.part)


def _make_plain_row(layout: GGMLFormat) -> Callable[..., None]:
    size = layout.bits // 8

    def plain_row(e: Emit, w: Any, groups: Any, lane: Any, out: Any) -> None:
        b = e.b
        with cgutils.for_range(b, b.mul(groups, I64(GROUP))) as loop:
            at = e.at(e.at(w, loop.index, TILE * size), lane, size)
            if layout is SINGLE:
                value = e.load(at, F32)
            elif layout is HALF:
                value = widen(e, e.load(at, F16))
            else:
                value = b.bitcast(b.shl(b.zext(e.load(at, ir.IntType(16)), I32), I32(16)), F32)
            e.store(e.at(out, loop.index, 4), value)

    plain_row.__name__ = f"plain_row_{layout.number}"
    return kernel(plain_row, layout.part)


ROW_KERNELS: dict[Layout, Any] = {
    **{layout: _make_plain_row(layout) if layout.plain else _make_coded_row(layout) for layout in GGML_FORMATS},
    **{layout: _make_group_row(layout) for layout in GROUP_FORMATS},
}


@inlined
def _call_row(e: Emit, address: Any, w: Any, groups: Any, lane: Any, out: Any) -> None:
    e.call_address(address, w, groups, lane, out)


@jit
def read_row(row_kernel: int, w: int, tile_bytes: int, groups: int, row: int, out: int) -> None:
    """Write row `row` of the weight at address w as float32 to `out`. `row_kernel` is an address of ROW_KERNELS."""
    _call_row(row_kernel, w + row // TILE * tile_bytes, groups, row % TILE, out)
