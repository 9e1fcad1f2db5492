"""Decode words of a packed matrix (`quant.cuda.matrix`): functions that the kernels for packed weights share.

The value of a weight is s * v - b, where s and b belong to the group, and v is the code or its value in the table. Two
codes become two bfloat16 numbers in one shift and one logical operation: the codes are the low bits of a mantissa, and
the number is 128 + code. Codes of 8 bits become two numbers, 128 + the low half and 2048 + 16 times the high half.
"""

import triton
import triton.language as tl

from quant.kernels.early_start import prefetch

BASE = 0x43004300  # bits of two bfloat16 numbers, 128 and 128


@triton.jit
def high_base(base: tl.tensor) -> tl.tensor:
    """Return the bits of 2048 and 2048, given BASE."""
    return base + 0x02000200


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
def _at(words: tl.tensor, SHIFT: tl.constexpr, AT: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    """Move BITS bits of each half of int32 words from bit SHIFT to bit AT, and clear all others."""
    moved = words >> (SHIFT - AT) if SHIFT >= AT else words << (AT - SHIFT)
    return moved & (((1 << BITS) - 1) * 0x10001 << AT)


@triton.jit
def _pairs_at(
    lows: tl.tensor, highs: tl.tensor, base: tl.tensor, NUMBER: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr
) -> tl.tensor:
    bits = _at(lows, 4 * NUMBER, 0, LOW) | base
    if HIGH:
        bits |= _at(highs, 4 * NUMBER, LOW, HIGH)
    return bits


@triton.jit
def code_pairs(lows: tl.tensor, highs: tl.tensor, base: tl.tensor, LOW: tl.constexpr, HIGH: tl.constexpr) -> tl.tensor:
    """Return base | code for all codes of words, uint16 [n, threads, 32].

    `lows` and `highs` are words of both planes, int32 [n, threads, 4]. The codes of a thread are in the order of its
    matrix instructions: instruction, pair, element of the pair.
    """
    first = tl.join(_pairs_at(lows, highs, base, 0, LOW, HIGH), _pairs_at(lows, highs, base, 1, LOW, HIGH))
    second = tl.join(_pairs_at(lows, highs, base, 2, LOW, HIGH), _pairs_at(lows, highs, base, 3, LOW, HIGH))
    pairs = tl.join(first, second).permute(0, 1, 2, 4, 3)
    codes = tl.join((pairs & 0xFFFF).to(tl.uint16), (pairs >> 16).to(tl.uint16))
    return codes.reshape(codes.shape[0], codes.shape[1], 32)


@triton.jit
def table_values(words: tl.tensor, number_pairs: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """Return the values of all codes of words, bfloat16 [n, threads, 32], in the order of `code_pairs`.

    Two values are loaded at a time, from int32 [256] (`PackedMatrix.number_pairs`).
    """
    first = tl.join(_at(words, 0, 0, BITS), _at(words, 4, 0, BITS))
    second = tl.join(_at(words, 8, 0, BITS), _at(words, 12, 0, BITS))
    codes = tl.join(first, second).permute(0, 1, 2, 4, 3)
    pairs = tl.load(number_pairs + ((codes | codes >> 12) & 0xFF))
    values = tl.join((pairs & 0xFFFF).to(tl.uint16), (pairs >> 16).to(tl.uint16))
    return values.reshape(words.shape[0], words.shape[1], 32).to(tl.bfloat16, bitcast=True)


@triton.jit
def words_of(fragments: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """Return four words of a plane of 1, 2, or 4 bits, [n, threads, 4], from its fragments [n, threads, BITS]."""
    if BITS == 4:
        return fragments
    shared = fragments[:, :, :, None] >> (tl.arange(0, 4 // BITS) * BITS)[None, None, None, :]
    return shared.reshape(fragments.shape[0], fragments.shape[1], 4)


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
def packed_columns(UNIT: tl.constexpr) -> tl.tensor:
    """Return the column in its tile of each weight of `scaled`, [1, 4, 32]."""
    RUN: tl.constexpr = 4 if UNIT == 16 else 8
    thread, index = tl.arange(0, 4)[None, :, None], tl.arange(0, 32)[None, None, :]
    return (4 * (index // RUN) + thread) * RUN + index % RUN


@triton.jit
def in_column_order(values: tl.tensor, UNIT: tl.constexpr) -> tl.tensor:
    """Return weights as `scaled` orders them as [n, 128]."""
    RUN: tl.constexpr = 4 if UNIT == 16 else 8
    N: tl.constexpr = values.shape[0]
    return values.reshape(N, 4, 32 // RUN, RUN).permute(0, 2, 1, 3).reshape(N, 128)


@triton.jit
def unpacked_tiles(
    low: tl.tensor,
    high: tl.tensor,
    scales: tl.tensor,
    sub_scales: tl.tensor,
    zeros: tl.tensor,
    numbers: tl.tensor,
    scale_table: tl.tensor,
    scale_offset: tl.tensor,
    row: tl.tensor,
    tile: tl.tensor,
    rows: tl.tensor,
    tiles: tl.tensor,
    groups: tl.tensor,
    chunks: tl.tensor,
    blocks: tl.tensor,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    RATIO: tl.constexpr,
    ZERO: tl.constexpr,
    MINIMUMS: tl.constexpr,
    SUB_SCALE_ZERO: tl.constexpr,
    NIBBLES: tl.constexpr,
    NESTED_BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return v, s, and b of weights of the rows `row` in the tiles `tile`, which broadcast to [n, 1], float32.

    v is [n, 4, UNITS, 32 / UNITS], where a tile has UNITS units of columns with one scale; s and b are [n, 4, UNITS].
    See `scaled` for the order of columns.
    """
    N: tl.constexpr = row.shape[0]
    UNITS: tl.constexpr = 128 // UNIT
    start = ((row // 8 * tiles + tile) * 8 + row % 8) * 4
    lows = words_of(tl.load(low + (start * LOW + tl.arange(0, 4 * LOW)[None, :])).reshape(N, 4, LOW), LOW)
    highs = lows
    if HIGH:
        highs = words_of(tl.load(high + (start * HIGH + tl.arange(0, 4 * HIGH)[None, :])).reshape(N, 4, HIGH), HIGH)
    codes = code_pairs(lows, highs, 0, LOW, 0 if HIGH == 4 else HIGH).to(tl.int32)
    if HIGH == 4:
        codes |= code_pairs(highs, highs, 0, 4, 0).to(tl.int32) << 4
    s, b = group_scales(
        scales, sub_scales, zeros, scale_table, scale_offset, row // 8, row % 8, tile * 128, rows, groups, chunks,
        blocks, 4, UNITS, 0, GROUP, UNIT, RATIO, ZERO, MINIMUMS, SUB_SCALE_ZERO, NIBBLES, NESTED_BLOCK,
    )  # fmt: skip
    numbers_of_codes = codes.to(tl.float32) if numbers is None else tl.load(numbers + codes)
    return numbers_of_codes.reshape(N, 4, UNITS, 32 // UNITS), s, b


@triton.jit
def scaled(v: tl.tensor, s: tl.tensor, b: tl.tensor) -> tl.tensor:
    """Return the weights of the result of `unpacked_tiles`, float32 [n, 4, 32].

    The weight [i, thread, 4 or 8 * run + k] is in column (4 * run + thread) * (4 or 8) + k of row i's tile.
    """
    return (s[:, :, :, None] * v - b[:, :, :, None]).reshape(v.shape[0], 4, 32)
