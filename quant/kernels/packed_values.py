"""What a word of a packed matrix means (`quant.cuda.matrix`): functions that kernels over packed weights are made of.

A value is s * number - b, where s and b are the group's and a number is the code, or what a table has for it.
"""

import triton
import triton.language as tl


@triton.jit
def powers(exponents: tl.tensor) -> tl.tensor:
    """2 ** (e - 128), float32; the two smallest are subnormal."""
    e = exponents.to(tl.int32)
    bits = tl.where(e < 2, 0x00200000 << tl.minimum(e, 1), tl.maximum(e - 1, 0) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def whole_scales(whole: tl.tensor, at: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """float32, from any type that they are stored in."""
    loaded = tl.load(whole + at, mask=mask, other=0)
    return powers(loaded) if whole.dtype.element_ty == tl.uint8 else loaded.to(tl.float32)


@triton.jit
def small_integers(pointer: tl.tensor, at: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Bytes as int32."""
    return tl.load(pointer + at, mask=mask, other=0).to(tl.int32)


@triton.jit
def group_scales(
    whole: tl.tensor,
    parts: tl.tensor,
    minimum: tl.tensor,
    minimum_parts: tl.tensor,
    zeros: tl.tensor,
    scale_table: tl.tensor,
    scale_offset: tl.tensor,
    at: tl.tensor,
    above: tl.tensor,
    mask: tl.tensor,
    ZERO: tl.constexpr,
    OFFSET: tl.constexpr,
    NIBBLES: tl.constexpr,
    NESTED_BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """s and b, float32, of the groups of number `at`, counted through all rows, whose whole scales have number `above`.

    0 where not `mask`.
    """
    if NESTED_BLOCK:
        code = small_integers(parts, at, mask)
        s = tl.load(scale_table + code) * tl.load(whole + at // NESTED_BLOCK, mask=mask, other=0.0) + scale_offset
    else:
        s = whole_scales(whole, above, mask)
    if parts is not None and not NESTED_BLOCK:
        part = small_integers(parts, at, mask)
        s *= ((part & 0xF if NIBBLES else part) - OFFSET).to(tl.float32)
    b = s * ZERO
    if zeros is not None:
        b = s * small_integers(zeros, at, mask).to(tl.float32)
    if minimum is not None:
        b = whole_scales(minimum, above, mask)
        if NIBBLES:
            b *= (small_integers(parts, at, mask) >> 4).to(tl.float32)
        elif minimum_parts is not None:
            b *= small_integers(minimum_parts, at, mask).to(tl.float32)
    return s, b


@triton.jit
def words_of(
    strips: tl.tensor, word: tl.tensor, LOW: tl.constexpr, HIGH: tl.constexpr, PHASES: tl.constexpr
) -> tl.tensor:
    """The second plane's bits of the words `word` of strips (int32 or int64), where the first plane's have theirs."""
    SHARE: tl.constexpr = LOW // HIGH
    return (strips >> (word // SHARE * (PHASES * LOW) + word % SHARE * HIGH)).to(tl.int32)


@triton.jit
def codes_of(lows: tl.tensor, highs: tl.tensor, phase: tl.tensor, LOW: tl.constexpr, HIGH: tl.constexpr) -> tl.tensor:
    """The codes at `phase` of words (int32), from one plane or two."""
    codes = (lows >> (phase * LOW)) & ((1 << LOW) - 1)
    if HIGH:
        codes |= ((highs >> (phase * LOW)) & ((1 << HIGH) - 1)) << LOW
    return codes
