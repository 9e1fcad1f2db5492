"""Load the scales of a packed matrix (`quant.cuda.matrix`): functions that the kernels for packed weights share.

The value of a weight is s * v - b, where s and b belong to the group, and v is the code or its value in the table.
"""

import triton
import triton.language as tl

from quant.kernels.early_start import prefetch


@triton.jit
def powers(exponents: tl.tensor) -> tl.tensor:
    """Return 2 ** (e - 128), float32; the two smallest results are subnormal."""
    e = exponents.to(tl.int32)
    bits = tl.where(e < 2, 0x00200000 << tl.minimum(e, 1), tl.maximum(e - 1, 0) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def small_floats(integers: tl.tensor) -> tl.tensor:
    """Convert integers from 0 to 2 ** 23 - 1 to float32: the bits of 2 ** 23 + n, minus 2 ** 23."""
    return (integers.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def _group_run(
    pointer: tl.tensor,
    row_tile: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    chunks: tl.tensor,
    LANES: tl.constexpr,
    COUNT: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    STRIDE: tl.constexpr,
) -> tl.tensor:
    """Load PARTS numbers of COUNT groups for each of LANES threads, [n, LANES * COUNT * PARTS]."""
    PER_CHUNK: tl.constexpr = 128 // GROUP if 128 % GROUP == 0 else 1
    RUN: tl.constexpr = COUNT * PARTS if PER_CHUNK >= COUNT else PARTS
    index = tl.arange(0, LANES * COUNT * PARTS)[None, :]
    thread, number = index // (COUNT * PARTS), index // PARTS % COUNT
    group = (column + thread % 4 * STRIDE + number * UNIT) // GROUP
    chunk = group // PER_CHUNK
    if STRIDE:  # the last threads may be in a tile after the last
        chunk = tl.minimum(chunk, chunks - 1)
    # the address of the rows first, because it is the same in all steps of a loop
    of_rows = pointer + ((row_tile * chunks * 8 + row + thread // 4) * (PER_CHUNK * PARTS))
    at = chunk * (8 * PER_CHUNK) + group % PER_CHUNK
    if PARTS > 1:
        at = at * PARTS + index % PARTS
    return tl.load(of_rows + tl.multiple_of(tl.max_contiguous(at, [1, RUN]), [1, RUN]))


@triton.jit
def _prefetch_run(
    pointer: tl.tensor,
    row_tile: tl.tensor,
    column: tl.tensor,
    chunks: tl.tensor,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """Prefetch the first line of what `_group_run` loads."""
    PER_CHUNK: tl.constexpr = 128 // GROUP if 128 % GROUP == 0 else 1
    chunk = tl.minimum(column // (GROUP * PER_CHUNK), chunks - 1)
    prefetch(pointer + (row_tile * chunks + chunk) * (8 * PER_CHUNK * PARTS))


@triton.jit
def prefetch_scales(
    scales: tl.tensor,
    sub_scales: tl.tensor,
    zeros: tl.tensor,
    row_tile: tl.tensor,
    column: tl.tensor,
    chunks: tl.tensor,
    blocks: tl.tensor,
    GROUP: tl.constexpr,
    RATIO: tl.constexpr,
    MINIMUMS: tl.constexpr,
    NIBBLES: tl.constexpr,
    NESTED_BLOCK: tl.constexpr,
) -> None:
    """Prefetch what `group_scales` loads for the rows of a tile, except for the scales of nested scales."""
    PARTS: tl.constexpr = 2 if MINIMUMS else 1
    if not NESTED_BLOCK:
        _prefetch_run(scales, row_tile, column, blocks, PARTS, GROUP * RATIO)
    if sub_scales is not None:
        _prefetch_run(sub_scales, row_tile, column, chunks, 1 if NIBBLES else PARTS, GROUP)
    if zeros is not None:
        _prefetch_run(zeros, row_tile, column, chunks, 1, GROUP)


@triton.jit
def _block_scales(loaded: tl.tensor) -> tl.tensor:
    return powers(loaded) if loaded.dtype == tl.uint8 else loaded.to(tl.float32)


@triton.jit
def group_scales(
    scales: tl.tensor,
    sub_scales: tl.tensor,
    zeros: tl.tensor,
    scale_table: tl.tensor,
    scale_offset: tl.tensor,
    row_tile: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    rows: tl.tensor,
    groups: tl.tensor,
    chunks: tl.tensor,
    blocks: tl.tensor,
    LANES: tl.constexpr,
    COUNT: tl.constexpr,
    STRIDE: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    RATIO: tl.constexpr,
    ZERO: tl.constexpr,
    MINIMUMS: tl.constexpr,
    SUB_SCALE_ZERO: tl.constexpr,
    NIBBLES: tl.constexpr,
    NESTED_BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return s and b, float32 [n, LANES, COUNT], for COUNT units of columns of each thread.

    Thread i has row `row` + i // 4 of a tile (`row_tile` and `row` are [n, 1]), and its units start at `column` ([n,
    1]) + i % 4 * STRIDE.
    """
    n: tl.constexpr = row_tile.shape[0]
    PARTS: tl.constexpr = 2 if MINIMUMS else 1
    SUB_PARTS: tl.constexpr = 1 if NIBBLES else PARTS
    if NESTED_BLOCK:
        code = _group_run(sub_scales, row_tile, row, column, chunks, LANES, COUNT, 1, GROUP, UNIT, STRIDE).to(tl.int32)
        index = tl.arange(0, LANES * COUNT)[None, :]
        group = (column + index // COUNT % 4 * STRIDE + index % COUNT * UNIT) // GROUP
        own_row = row_tile * 8 + row + index // (4 * COUNT)
        inside = (own_row < rows) & (group < groups)
        whole = tl.load(scales + (own_row * groups + group) // NESTED_BLOCK, mask=inside, other=0.0)
        s = (tl.load(scale_table + code) * whole + scale_offset).reshape(n, LANES, COUNT)
        return s, s * ZERO
    OWN: tl.constexpr = COUNT if RATIO == 1 else 1
    d = _block_scales(_group_run(scales, row_tile, row, column, blocks, LANES, OWN, PARTS, GROUP * RATIO, UNIT, STRIDE))
    if MINIMUMS:
        s, b = tl.split(d.reshape(n, LANES, OWN, 2))
    else:
        s = d.reshape(n, LANES, OWN)
        b = s
    if sub_scales is not None:
        sub = _group_run(sub_scales, row_tile, row, column, chunks, LANES, COUNT, SUB_PARTS, GROUP, UNIT, STRIDE)
        if NIBBLES:
            sub = sub.reshape(n, LANES, COUNT)
            s, b = s * small_floats(sub & 0xF), b * small_floats(sub >> 4)
        elif MINIMUMS:
            part, least = tl.split(sub.reshape(n, LANES, COUNT, 2))
            s, b = s * small_floats(part), b * small_floats(least)
        else:
            s = s * (small_floats(sub.reshape(n, LANES, COUNT)) - SUB_SCALE_ZERO)
    if zeros is not None:
        zero = _group_run(zeros, row_tile, row, column, chunks, LANES, COUNT, 1, GROUP, UNIT, STRIDE)
        b = s * small_floats(zero.reshape(n, LANES, COUNT))
    elif not MINIMUMS:
        b = s * ZERO
    return s, b


@triton.jit
def of_spans(units: tl.tensor) -> tl.tensor:
    """Return the numbers of the four spans of 32 columns of a tile, [n, 4], given those of its 1, 2, or 4 units."""
    N: tl.constexpr = units.shape[0]
    UNITS: tl.constexpr = units.shape[1]
    return units[:, :, None].broadcast_to(N, UNITS, 4 // UNITS).reshape(N, 4)
