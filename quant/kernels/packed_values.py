"""Decode words of a packed matrix (`quant.cuda.matrix`): functions that the kernels for packed weights share.

The value of a weight is s * v - b, where s and b belong to the group, and v is the code or its value in the table.
"""

import triton
import triton.language as tl


@triton.jit
def powers(exponents: tl.tensor) -> tl.tensor:
    """Return 2 ** (e - 128), float32; the two smallest results are subnormal."""
    e = exponents.to(tl.int32)
    bits = tl.where(e < 2, 0x00200000 << tl.minimum(e, 1), tl.maximum(e - 1, 0) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def load_scales(scales: tl.tensor, at: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Load scales of any stored type as float32."""
    loaded = tl.load(scales + at, mask=mask, other=0)
    return powers(loaded) if scales.dtype.element_ty == tl.uint8 else loaded.to(tl.float32)


@triton.jit
def small_integers(pointer: tl.tensor, at: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Load bytes as int32."""
    return tl.load(pointer + at, mask=mask, other=0).to(tl.int32)


@triton.jit
def group_scales(
    scales: tl.tensor,
    sub_scales: tl.tensor,
    minimums: tl.tensor,
    sub_minimums: tl.tensor,
    zeros: tl.tensor,
    scale_table: tl.tensor,
    scale_offset: tl.tensor,
    at: tl.tensor,
    at_block: tl.tensor,
    mask: tl.tensor,
    ZERO: tl.constexpr,
    SUB_SCALE_ZERO: tl.constexpr,
    NIBBLES: tl.constexpr,
    NESTED_BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return s and b, float32, of the groups with the indices `at`, whose block scales have the indices `at_block`.

    Groups are counted through all rows. The results are 0 where `mask` is false.
    """
    if NESTED_BLOCK:
        code = small_integers(sub_scales, at, mask)
        s = tl.load(scale_table + code) * tl.load(scales + at // NESTED_BLOCK, mask=mask, other=0.0) + scale_offset
    else:
        s = load_scales(scales, at_block, mask)
    if sub_scales is not None and not NESTED_BLOCK:
        part = small_integers(sub_scales, at, mask)
        s *= ((part & 0xF if NIBBLES else part) - SUB_SCALE_ZERO).to(tl.float32)
    b = s * ZERO
    if zeros is not None:
        b = s * small_integers(zeros, at, mask).to(tl.float32)
    if minimums is not None:
        b = load_scales(minimums, at_block, mask)
        if NIBBLES:
            b *= (small_integers(sub_scales, at, mask) >> 4).to(tl.float32)
        elif sub_minimums is not None:
            b *= small_integers(sub_minimums, at, mask).to(tl.float32)
    return s, b


@triton.jit
def words_of(
    fragments: tl.tensor, word: tl.tensor, LOW: tl.constexpr, HIGH: tl.constexpr, CODES_PER_WORD: tl.constexpr
) -> tl.tensor:
    """Return the second plane's bits of the words `word` of fragments (int32 or int64), aligned with the first plane's
    codes.
    """
    SHARE: tl.constexpr = LOW // HIGH
    return (fragments >> (word // SHARE * (CODES_PER_WORD * LOW) + word % SHARE * HIGH)).to(tl.int32)


@triton.jit
def codes_of(
    lows: tl.tensor, highs: tl.tensor, position: tl.tensor, LOW: tl.constexpr, HIGH: tl.constexpr
) -> tl.tensor:
    """Return the codes at `position` of words (int32), from one plane or two."""
    codes = (lows >> (position * LOW)) & ((1 << LOW) - 1)
    if HIGH:
        codes |= ((highs >> (position * LOW)) & ((1 << HIGH) - 1)) << LOW
    return codes
