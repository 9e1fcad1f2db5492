"""Dot products of integers in vector code: the instructions of each tier for products of bytes and of int16.

All ways give the same bits. Bytes of codes are unsigned, and bytes of activations are signed.
"""

from llvmlite import ir

from quant.cpu.vector import I8, I16, I32, Emit, I8x16, I8x64, I16x32, I32x16, Table

_DOTS: Table = (  # add four products of an unsigned and a signed byte to each int32
    ("avx512vnni", 64, "llvm.x86.avx512.vpdpbusd.512"),
    ("avxvnni", 32, "llvm.x86.avx512.vpdpbusd.256"),
)
_WORD_DOTS: Table = (  # add two products of int16 to each int32
    ("avx512vnni", 64, "llvm.x86.avx512.vpdpwssd.512"),
    ("avxvnni", 32, "llvm.x86.avx512.vpdpwssd.256"),
)
_BYTE_PAIRS: Table = (  # add two products of an unsigned and a signed byte to one int16, saturated
    ("avx2", 32, "llvm.x86.avx2.pmadd.ub.sw"),
    ("ssse3", 16, "llvm.x86.ssse3.pmadd.ub.sw.128"),
)
_WORD_PAIRS: Table = (  # add two products of int16 to one int32
    ("avx2", 32, "llvm.x86.avx2.pmadd.wd"),
    ("sse2", 16, "llvm.x86.sse2.pmadd.wd"),
)


def dot(e: Emit, total: ir.Value, codes: ir.Value, x: ir.Value, bits: int = 8) -> ir.Value:
    """Return total + the dot products of four codes and four signed bytes in each int32 lane, exactly.

    Codes are unsigned bytes below 2 ** bits, and no byte of x is -128.
    """
    codes, x = e.b.bitcast(codes, I32x16), e.b.bitcast(x, I32x16)
    if e.has(_DOTS):
        return e.apply("dot_whole", I32x16, _dot_whole, total, codes, x)
    if e.target.has("dotprod"):
        if bits < 8:
            return e.apply("dot_signed", I32x16, _dot_signed, total, codes, x)
        return e.apply("dot_wide", I32x16, _dot_wide, total, codes, x)
    if bits < 8 and e.has(_BYTE_PAIRS):
        return add_words(e, total, byte_pairs(e, codes, x))
    return e.b.add(total, e.apply("dot_words", I32x16, _dot_words, codes, x))


def _dot_whole(e: Emit, total: ir.Value, codes: ir.Value, x: ir.Value) -> ir.Value:
    """Compute `dot` on targets that have one instruction for it."""
    size, name = e.instruction(_DOTS)
    return e.in_parts(size, lambda t, c, v: e.call(name, t.type, t, c, v), total, codes, x)


def _dot_signed(e: Emit, total: ir.Value, codes: ir.Value, x: ir.Value) -> ir.Value:
    """Compute `dot` with an instruction for signed bytes on both sides."""

    def part(t: ir.Value, *bytes_: ir.Value) -> ir.Value:
        c, v = (e.b.bitcast(it, I8x16) for it in bytes_)
        return e.call("llvm.aarch64.neon.sdot.v4i32.v16i8", t.type, t, c, v)

    return e.in_parts(16, part, total, codes, x)


def _dot_wide(e: Emit, total: ir.Value, codes: ir.Value, x: ir.Value) -> ir.Value:
    """Compute `dot` for 8-bit codes with signed bytes: the top bit is multiplied separately."""
    b, codes = e.b, e.b.bitcast(codes, I8x64)
    low, top = b.and_(codes, e.constant(I8x64, 127)), b.lshr(codes, e.constant(I8x64, 7))
    return b.add(_dot_signed(e, total, low, x), b.shl(_dot_signed(e, e.i(0), top, x), e.i(7)))


def multiplies_byte_pairs(e: Emit) -> bool:
    """Whether `byte_pairs` is the target's shortest way to a dot product of bytes."""
    return e.has(_BYTE_PAIRS) and not e.has(_DOTS)


def byte_pairs(e: Emit, codes: ir.Value, x: ir.Value) -> ir.Value:
    """Return sums of two products of an unsigned and a signed byte, as 32 int16, which they must fit into."""
    codes, x = e.b.bitcast(codes, I32x16), e.b.bitcast(x, I32x16)
    return e.apply("byte_pairs", I16x32, _byte_pairs, codes, x)


def _byte_pairs(e: Emit, codes: ir.Value, x: ir.Value) -> ir.Value:
    size, name = e.instruction(_BYTE_PAIRS)
    kind, pairs = ir.VectorType(I8, size), ir.VectorType(I16, size // 2)

    def part(c: ir.Value, v: ir.Value) -> ir.Value:
        return e.call(name, pairs, e.b.bitcast(c, kind), e.b.bitcast(v, kind))

    return e.in_parts(size, part, codes, x)


def add_words(e: Emit, total: ir.Value, words: ir.Value) -> ir.Value:
    """Add the two int16 in each int32 lane to `total`, exactly."""
    return e.b.add(total, e.apply("sum_words", I32x16, _sum_words, words))


def _sum_words(e: Emit, words: ir.Value) -> ir.Value:
    return _word_pairs(e, words, e.constant(I16x32, 1))


def _word_pairs(e: Emit, x: ir.Value, y: ir.Value) -> ir.Value:
    """Return int32 lanes of x[2i] * y[2i] + x[2i + 1] * y[2i + 1], of int16 whose products fit into int16."""
    b, kind = e.b, ir.VectorType(I32, x.type.count // 2)
    if e.has(_WORD_PAIRS):
        size, name = e.instruction(_WORD_PAIRS)
        return e.in_parts(size, lambda p, q: e.call(name, ir.VectorType(I32, size // 4), p, q), x, y)
    products, sixteen = b.bitcast(b.mul(x, y), kind), e.constant(kind, 16)
    return b.add(b.ashr(b.shl(products, sixteen), sixteen), b.ashr(products, sixteen))


def _dot_words(e: Emit, codes: ir.Value, x: ir.Value) -> ir.Value:
    """Return sums of four products. Even and odd bytes are widened to int16 and multiplied separately."""
    b, eight = e.b, e.constant(I16x32, 8)
    codes, x = b.bitcast(codes, I16x32), b.bitcast(x, I16x32)
    even = _word_pairs(e, b.and_(codes, e.constant(I16x32, 255)), b.ashr(b.shl(x, eight), eight))
    return b.add(even, _word_pairs(e, b.lshr(codes, eight), b.ashr(x, eight)))


def dot_of_words(e: Emit, total: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    """Return total + the dot product of two pairs of int16 in each int32 lane, exact if it fits into int32."""
    if e.has(_WORD_DOTS):
        return e.apply("dot_of_words", I32x16, _dot_of_words, total, x, y)
    if e.has(_WORD_PAIRS):
        return e.b.add(total, _word_pairs(e, e.b.bitcast(x, I16x32), e.b.bitcast(y, I16x32)))
    b, sixteen = e.b, e.i(16)
    low, high = ([b.ashr(b.shl(v, sixteen), sixteen) for v in (x, y)], [b.ashr(v, sixteen) for v in (x, y)])
    return b.add(b.add(total, b.mul(*low)), b.mul(*high))


def _dot_of_words(e: Emit, total: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    """Compute `dot_of_words` on targets that have one instruction for it."""
    size, name = e.instruction(_WORD_DOTS)
    return e.in_parts(size, lambda t, p, q: e.call(name, t.type, t, p, q), total, x, y)
