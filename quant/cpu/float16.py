"""Conversion between float16 and float32 in vector code, with integers on targets without instructions for it."""

from llvmlite import ir

from quant.cpu.vector import F16, F32, I16, I32, Emit


def widen(e: Emit, half: ir.Value) -> ir.Value:
    """Convert float16, a vector or a scalar, to float32."""
    if e.target.has("f16c", "neon"):
        return e.b.fpext(half, _shaped(F32, half.type))
    return e.apply(f"widen {half.type}", _shaped(F32, half.type), _widen_bits, half)


def _widen_bits(e: Emit, half: ir.Value) -> ir.Value:
    """Compute `widen` with integers. A subnormal float16 is an integer times 2 ** -24."""
    b, kind = e.b, _shaped(I32, half.type)

    def i(value: int) -> ir.Constant:
        return e.constant(kind, value)

    bits = b.zext(b.bitcast(half, _shaped(I16, half.type)), kind)
    magnitude = b.and_(bits, i(0x7FFF))
    moved = b.add(b.shl(magnitude, i(13)), i(112 << 23))
    endless = b.icmp_signed(">=", magnitude, i(0x7C00))
    moved = b.select(endless, b.add(moved, i(112 << 23)), moved)
    floats = _shaped(F32, half.type)
    tiny = b.fmul(b.sitofp(magnitude, floats), e.constant(floats, 2.0**-24))
    moved = b.select(b.icmp_signed("<", magnitude, i(0x0400)), b.bitcast(tiny, kind), moved)
    sign = b.shl(b.and_(bits, i(0x8000)), i(16))
    return b.bitcast(b.or_(moved, sign), floats)


def narrow(e: Emit, single: ir.Value) -> ir.Value:
    """Convert float32, a vector or a scalar, to the nearest float16, ties to even."""
    if e.target.has("f16c", "neon"):
        return e.b.fptrunc(single, _shaped(F16, single.type))
    return e.apply(f"narrow {single.type}", _shaped(F16, single.type), _narrow_bits, single)


def _narrow_bits(e: Emit, single: ir.Value) -> ir.Value:
    """Compute `narrow` with integers. For subnormal results, adding 1/2 rounds at the last bit."""
    b, kind = e.b, _shaped(I32, single.type)

    def i(value: int) -> ir.Constant:
        return e.constant(kind, value)

    bits = b.bitcast(single, kind)
    magnitude = b.and_(bits, i(0x7FFFFFFF))
    odd = b.and_(b.lshr(magnitude, i(13)), i(1))
    rounded = b.lshr(b.add(b.add(magnitude, i(0xFFF - (112 << 23))), odd), i(13))
    rounded = b.select(b.icmp_signed(">=", magnitude, i(0x47800000)), i(0x7C00), rounded)
    tiny = b.fadd(b.bitcast(magnitude, single.type), e.constant(single.type, 0.5))
    tiny = b.sub(b.bitcast(tiny, kind), i(0x3F000000))
    rounded = b.select(b.icmp_signed("<", magnitude, i(0x38800000)), tiny, rounded)
    none = b.or_(b.and_(b.lshr(magnitude, i(13)), i(0x3FF)), i(0x7E00))
    rounded = b.select(b.icmp_signed(">", magnitude, i(0x7F800000)), none, rounded)
    signed = b.or_(rounded, b.and_(b.lshr(bits, i(16)), i(0x8000)))
    return b.bitcast(b.trunc(signed, _shaped(I16, single.type)), _shaped(F16, single.type))


def _shaped(element: ir.Type, like: ir.Type) -> ir.Type:
    """Return a vector type with as many elements as `like`, or the element type if `like` is a scalar."""
    return ir.VectorType(element, like.count) if isinstance(like, ir.VectorType) else element
