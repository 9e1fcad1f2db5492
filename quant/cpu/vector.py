"""`Emit`: vector code in LLVM's intermediate language, in which kernels are written.

numba's own vectorizer is 50 to 100 times slower on quantized weights. So kernels are written for vectors of 16 lanes of
float32, which LLVM divides into the registers of the processor. `Emit` has the operations that need different
instructions on each tier. All tiers give the same bits, with one exception: without fused multiply-adds, `fma` rounds
twice. There is no fast-math: the order of every sum is defined here, so that bits depend neither on threads nor on the
division of work.
"""

import struct
from collections.abc import Callable, Sequence
from functools import partial

from llvmlite import ir
from numba.core import cgutils

from quant.cpu.tiers import Target

LANES = 16

I8, I16, I32, I64, F16, F32 = (
    ir.IntType(8),
    ir.IntType(16),
    ir.IntType(32),
    ir.IntType(64),
    ir.HalfType(),
    ir.FloatType(),
)
I8x16, I8x32, I8x64 = (ir.VectorType(I8, count) for count in (16, 32, 64))
I16x32 = ir.VectorType(I16, 32)
I16x16, I32x16, F16x16, F32x16 = (ir.VectorType(kind, LANES) for kind in (I16, I32, F16, F32))
F32x8 = ir.VectorType(F32, 8)
LANE_NUMBERS = ir.Constant(I32x16, list(range(LANES)))

# Alternative instructions: a feature, bytes per instruction, a name. The first that the target has is used.
Table = tuple[tuple[str, int, str], ...]
_SHUFFLES: Table = (  # each byte of an index vector, 0..15, selects one of 16 bytes
    ("avx512bw", 64, "llvm.x86.avx512.pshuf.b.512"),
    ("avx2", 32, "llvm.x86.avx2.pshuf.b"),
    ("ssse3", 16, "llvm.x86.ssse3.pshuf.b.128"),
    ("neon", 16, "llvm.aarch64.neon.tbl1.v16i8"),
)
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


class Emit:
    """A thin layer over an IRBuilder: addresses are i64, and vectors have 16 lanes."""

    def __init__(self, builder: ir.IRBuilder, target: Target) -> None:
        self.b = builder
        self.target = target

    @property
    def has_few_registers(self) -> bool:
        """Whether the target has too few registers for 32 vectors of 16 lanes."""
        return not self.target.has("avx512f")

    def at(self, base: ir.Value, index: ir.Value | int, stride: int = 1) -> ir.Value:
        """Return the address base + index * stride."""
        index = I64(index) if isinstance(index, int) else index
        return self.b.add(base, self.b.mul(index, I64(stride)) if stride != 1 else index)

    def load(self, address: ir.Value, kind: ir.Type = F32x16, align: int = 1) -> ir.Value:
        value = self.b.load(self.b.inttoptr(address, kind.as_pointer()))
        value.align = align
        return value

    def store(self, address: ir.Value, value: ir.Value, align: int = 1) -> None:
        self.b.store(value, self.b.inttoptr(address, value.type.as_pointer())).align = align

    def first_lanes(self, count: ir.Value) -> ir.Value:
        """Return a mask of the lanes below `count`, an i64."""
        return self.b.icmp_signed("<", LANE_NUMBERS, self.splat(self.b.trunc(count, I32)))

    def load_some(self, address: ir.Value, mask: ir.Value) -> ir.Value:
        """Load 16 float32. Lanes outside the mask are 0, and their memory is not accessed."""
        pointer = self.b.inttoptr(address, F32x16.as_pointer())
        return self.call("llvm.masked.load.v16f32.p0", F32x16, pointer, I32(4), mask, self.f(0))

    def store_some(self, address: ir.Value, value: ir.Value, mask: ir.Value) -> None:
        pointer = self.b.inttoptr(address, F32x16.as_pointer())
        self.call("llvm.masked.store.v16f32.p0", ir.VoidType(), value, pointer, I32(4), mask)

    def pause(self) -> None:
        """Let another hardware thread of this core run for a moment."""
        if self.target.architecture == "x86_64":
            self.call("llvm.x86.sse2.pause", ir.VoidType())
        elif self.target.architecture == "aarch64":
            self.call("llvm.aarch64.isb", ir.VoidType(), I32(15))

    def constant(self, kind: ir.Type, value: float) -> ir.Constant:
        """Return a scalar constant, or a vector with the value in all lanes."""
        return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)

    def f(self, value: float) -> ir.Constant:
        return ir.Constant(F32x16, [float(value)] * LANES)

    def i(self, value: int) -> ir.Constant:
        return ir.Constant(I32x16, [value] * LANES)

    def splat(self, scalar: ir.Value) -> ir.Value:
        kind = ir.VectorType(scalar.type, LANES)
        one = self.b.insert_element(ir.Constant(kind, ir.Undefined), scalar, I32(0))
        return self.b.shuffle_vector(one, one, self.i(0))

    def float_from_bits(self, bits: ir.Value) -> ir.Value:
        """Return the float32 whose bits are the low half of an i64."""
        return self.b.bitcast(self.b.trunc(bits, I32), F32)

    def variable(self, value: ir.Value) -> ir.Value:
        """Return a stack slot, which LLVM turns into a register."""
        return cgutils.alloca_once_value(self.b, value)

    def call(self, name: str, kind: ir.Type, *args: ir.Value) -> ir.Value:
        module = self.b.module
        function = module.globals.get(name) or ir.Function(module, ir.FunctionType(kind, [a.type for a in args]), name)
        return self.b.call(function, args)

    def call_address(self, address: ir.Value, *args: ir.Value) -> None:
        """Call the kernel at an address, which returns nothing."""
        kind = ir.FunctionType(ir.VoidType(), [I64] * len(args))
        self.b.call(self.b.inttoptr(address, kind.as_pointer()), args)

    def fma(self, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
        """Return x * y + z, rounded once if the target has fused multiply-adds."""
        if self.target.has("fma", "neon"):
            return self.call("llvm.fma.v16f32", F32x16, x, y, z)
        return self.b.fadd(self.b.fmul(x, y), z)

    def dot(self, total: ir.Value, codes: ir.Value, x: ir.Value, bits: int = 8) -> ir.Value:
        """Return total + the dot products of four codes and four signed bytes in each int32 lane, exactly.

        Codes are unsigned bytes below 2 ** bits, and no byte of x is -128.
        """
        codes, x = self.b.bitcast(codes, I32x16), self.b.bitcast(x, I32x16)
        if self._has(_DOTS):
            return self._apply("dot_whole", I32x16, Emit._dot_whole, total, codes, x)
        if self.target.has("dotprod"):
            if bits < 8:
                return self._apply("dot_signed", I32x16, Emit._dot_signed, total, codes, x)
            return self._apply("dot_wide", I32x16, Emit._dot_wide, total, codes, x)
        if bits < 8 and self._has(_BYTE_PAIRS):
            return self.add_words(total, self.byte_pairs(codes, x))
        return self.b.add(total, self._apply("dot_words", I32x16, Emit._dot_words, codes, x))

    def _dot_whole(self, total: ir.Value, codes: ir.Value, x: ir.Value) -> ir.Value:
        """Compute `dot` on targets that have one instruction for it."""
        size, name = self._instruction(_DOTS)
        return self.in_parts(size, lambda t, c, v: self.call(name, t.type, t, c, v), total, codes, x)

    def _dot_signed(self, total: ir.Value, codes: ir.Value, x: ir.Value) -> ir.Value:
        """Compute `dot` with an instruction for signed bytes on both sides."""

        def part(t: ir.Value, *bytes_: ir.Value) -> ir.Value:
            c, v = (self.b.bitcast(it, I8x16) for it in bytes_)
            return self.call("llvm.aarch64.neon.sdot.v4i32.v16i8", t.type, t, c, v)

        return self.in_parts(16, part, total, codes, x)

    def _dot_wide(self, total: ir.Value, codes: ir.Value, x: ir.Value) -> ir.Value:
        """Compute `dot` for 8-bit codes with signed bytes: the top bit is multiplied separately."""
        b, codes = self.b, self.b.bitcast(codes, I8x64)
        low, top = b.and_(codes, self.constant(I8x64, 127)), b.lshr(codes, self.constant(I8x64, 7))
        return b.add(self._dot_signed(total, low, x), b.shl(self._dot_signed(self.i(0), top, x), self.i(7)))

    @property
    def multiplies_byte_pairs(self) -> bool:
        """Whether `byte_pairs` is the target's shortest way to a dot product of bytes."""
        return self._has(_BYTE_PAIRS) and not self._has(_DOTS)

    def byte_pairs(self, codes: ir.Value, x: ir.Value) -> ir.Value:
        """Return sums of two products of an unsigned and a signed byte, as 32 int16, which they must fit into."""
        codes, x = self.b.bitcast(codes, I32x16), self.b.bitcast(x, I32x16)
        return self._apply("byte_pairs", I16x32, Emit._byte_pairs, codes, x)

    def _byte_pairs(self, codes: ir.Value, x: ir.Value) -> ir.Value:
        size, name = self._instruction(_BYTE_PAIRS)
        kind, pairs = ir.VectorType(I8, size), ir.VectorType(I16, size // 2)

        def part(c: ir.Value, v: ir.Value) -> ir.Value:
            return self.call(name, pairs, self.b.bitcast(c, kind), self.b.bitcast(v, kind))

        return self.in_parts(size, part, codes, x)

    def add_words(self, total: ir.Value, words: ir.Value) -> ir.Value:
        """Add the two int16 in each int32 lane to `total`, exactly."""
        return self.b.add(total, self._apply("sum_words", I32x16, Emit._sum_words, words))

    def _sum_words(self, words: ir.Value) -> ir.Value:
        return self._word_pairs(words, self.constant(I16x32, 1))

    def _word_pairs(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """Return int32 lanes of x[2i] * y[2i] + x[2i + 1] * y[2i + 1], of int16 whose products fit into int16."""
        b, kind = self.b, ir.VectorType(I32, x.type.count // 2)
        if self._has(_WORD_PAIRS):
            size, name = self._instruction(_WORD_PAIRS)
            return self.in_parts(size, lambda p, q: self.call(name, ir.VectorType(I32, size // 4), p, q), x, y)
        products, sixteen = b.bitcast(b.mul(x, y), kind), self.constant(kind, 16)
        return b.add(b.ashr(b.shl(products, sixteen), sixteen), b.ashr(products, sixteen))

    def _dot_words(self, codes: ir.Value, x: ir.Value) -> ir.Value:
        """Return sums of four products. Even and odd bytes are widened to int16 and multiplied separately."""
        b, eight = self.b, self.constant(I16x32, 8)
        codes, x = b.bitcast(codes, I16x32), b.bitcast(x, I16x32)
        even = self._word_pairs(b.and_(codes, self.constant(I16x32, 255)), b.ashr(b.shl(x, eight), eight))
        return b.add(even, self._word_pairs(b.lshr(codes, eight), b.ashr(x, eight)))

    def dot_of_words(self, total: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
        """Return total + the dot product of two pairs of int16 in each int32 lane, exact if it fits into int32."""
        if self._has(_WORD_DOTS):
            return self._apply("dot_of_words", I32x16, Emit._dot_of_words, total, x, y)
        if self._has(_WORD_PAIRS):
            return self.b.add(total, self._word_pairs(self.b.bitcast(x, I16x32), self.b.bitcast(y, I16x32)))
        b, sixteen = self.b, self.i(16)
        low, high = ([b.ashr(b.shl(v, sixteen), sixteen) for v in (x, y)], [b.ashr(v, sixteen) for v in (x, y)])
        return b.add(b.add(total, b.mul(*low)), b.mul(*high))

    def _dot_of_words(self, total: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
        """Compute `dot_of_words` on targets that have one instruction for it."""
        size, name = self._instruction(_WORD_DOTS)
        return self.in_parts(size, lambda t, p, q: self.call(name, t.type, t, p, q), total, x, y)

    def lookup(self, codes: ir.Value, table: Sequence[int]) -> ir.Value:
        """Look up bytes in a table of 16 bytes. `codes` has at least 16 bytes, each from 0 to 15."""
        b = self.b
        if self._has(_SHUFFLES):
            size, name = self._instruction(_SHUFFLES, at_most=codes.type.count)
            entries = ir.Constant(ir.VectorType(I8, size), [*table] * (size // 16))
            return self.in_parts(size, lambda c: self.call(name, c.type, entries, c), codes)
        level = [self.constant(codes.type, entry) for entry in table]
        for bit in (1, 2, 4, 8):
            odd = b.icmp_unsigned("!=", b.and_(codes, self.constant(codes.type, bit)), self.constant(codes.type, 0))
            level = [b.select(odd, level[i + 1], level[i]) for i in range(0, len(level), 2)]
        return level[0]

    def lookup_floats(self, codes: ir.Value, table: Sequence[float]) -> ir.Value:
        """Look up values in a table of 16 float32 by the low four bits of int32 lanes. Higher bits are ignored."""
        name = f"lookup {' '.join(map(float.hex, map(float, table)))}"
        return self._apply(name, F32x16, partial(Emit._lookup_floats, table=table), codes)

    def _lookup_floats(self, codes: ir.Value, table: Sequence[float]) -> ir.Value:
        b = self.b
        if self.target.has("avx512f"):
            return self.call("llvm.x86.avx512.permvar.sf.512", F32x16, ir.Constant(F32x16, [*table]), codes)
        if self.target.has("avx2"):
            halves = [
                self.in_parts(32, partial(self.call, "llvm.x86.avx2.permps", F32x8, ir.Constant(F32x8, [*half])), codes)
                for half in (table[:8], table[8:])
            ]
            high = b.icmp_unsigned("!=", b.and_(codes, self.i(8)), self.i(0))
            return b.select(high, halves[1], halves[0])
        single = b.trunc(b.and_(codes, self.i(15)), I8x16)
        columns = zip(*(struct.pack("<f", number) for number in table), strict=True)
        low, second, third, high = (self.lookup(single, column) for column in columns)
        pairs = [b.bitcast(self._interleave(*two), I16x16) for two in ((low, second), (third, high))]
        return b.bitcast(self._interleave(*pairs), F32x16)

    def _interleave(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """Return x[0], y[0], x[1], y[1] and so on, for vectors of 16 lanes."""
        lanes = [lane + LANES * side for lane in range(LANES) for side in range(2)]
        return self.b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, 2 * LANES), lanes))

    def half_of(self, vector: ir.Value, half: int) -> ir.Value:
        """Return the first or the last 16 of 32 lanes."""
        lanes = list(range(LANES * half, LANES * (half + 1)))
        return self.b.shuffle_vector(vector, vector, ir.Constant(I32x16, lanes))

    def gather(self, addresses: Sequence[ir.Value]) -> ir.Value:
        """Load the float32 at each of 16 addresses."""
        found = ir.Constant(F32x16, ir.Undefined)
        for lane, address in enumerate(addresses):
            found = self.b.insert_element(found, self.load(address, F32), I32(lane))
        return found

    # -- float16

    def widen(self, half: ir.Value) -> ir.Value:
        """Convert float16, a vector or a scalar, to float32."""
        if self.target.has("f16c", "neon"):
            return self.b.fpext(half, _shaped(F32, half.type))
        return self._apply(f"widen {half.type}", _shaped(F32, half.type), Emit._widen_bits, half)

    def _widen_bits(self, half: ir.Value) -> ir.Value:
        """Compute `widen` with integers. A subnormal float16 is an integer times 2 ** -24."""
        b, kind = self.b, _shaped(I32, half.type)

        def i(value: int) -> ir.Constant:
            return self.constant(kind, value)

        bits = b.zext(b.bitcast(half, _shaped(I16, half.type)), kind)
        magnitude = b.and_(bits, i(0x7FFF))
        moved = b.add(b.shl(magnitude, i(13)), i(112 << 23))
        endless = b.icmp_signed(">=", magnitude, i(0x7C00))
        moved = b.select(endless, b.add(moved, i(112 << 23)), moved)
        floats = _shaped(F32, half.type)
        tiny = b.fmul(b.sitofp(magnitude, floats), self.constant(floats, 2.0**-24))
        moved = b.select(b.icmp_signed("<", magnitude, i(0x0400)), b.bitcast(tiny, kind), moved)
        sign = b.shl(b.and_(bits, i(0x8000)), i(16))
        return b.bitcast(b.or_(moved, sign), floats)

    def narrow(self, single: ir.Value) -> ir.Value:
        """Convert float32, a vector or a scalar, to the nearest float16, ties to even."""
        if self.target.has("f16c", "neon"):
            return self.b.fptrunc(single, _shaped(F16, single.type))
        return self._apply(f"narrow {single.type}", _shaped(F16, single.type), Emit._narrow_bits, single)

    def _narrow_bits(self, single: ir.Value) -> ir.Value:
        """Compute `narrow` with integers. For subnormal results, adding 1/2 rounds at the last bit."""
        b, kind = self.b, _shaped(I32, single.type)

        def i(value: int) -> ir.Constant:
            return self.constant(kind, value)

        bits = b.bitcast(single, kind)
        magnitude = b.and_(bits, i(0x7FFFFFFF))
        odd = b.and_(b.lshr(magnitude, i(13)), i(1))
        rounded = b.lshr(b.add(b.add(magnitude, i(0xFFF - (112 << 23))), odd), i(13))
        rounded = b.select(b.icmp_signed(">=", magnitude, i(0x47800000)), i(0x7C00), rounded)
        tiny = b.fadd(b.bitcast(magnitude, single.type), self.constant(single.type, 0.5))
        tiny = b.sub(b.bitcast(tiny, kind), i(0x3F000000))
        rounded = b.select(b.icmp_signed("<", magnitude, i(0x38800000)), tiny, rounded)
        none = b.or_(b.and_(b.lshr(magnitude, i(13)), i(0x3FF)), i(0x7E00))
        rounded = b.select(b.icmp_signed(">", magnitude, i(0x7F800000)), none, rounded)
        signed = b.or_(rounded, b.and_(b.lshr(bits, i(16)), i(0x8000)))
        return b.bitcast(b.trunc(signed, _shaped(I16, single.type)), _shaped(F16, single.type))

    # -- division of vectors into register-sized parts

    def _apply(self, name: str, kind: ir.Type, build: Callable[..., ir.Value], *args: ir.Value) -> ir.Value:
        """Call build(emit, *args) as a function that is emitted once per module and that LLVM inlines."""
        module = self.b.module
        function = module.globals.get(name)
        if function is None:
            function = ir.Function(module, ir.FunctionType(kind, [it.type for it in args]), name)
            function.linkage = "internal"
            function.attributes.add("alwaysinline")
            builder = ir.IRBuilder(function.append_basic_block())
            builder.ret(build(Emit(builder, self.target), *function.args))
        return self.b.call(function, args)

    def in_parts(self, size: int, compute: Callable[..., ir.Value], *vectors: ir.Value) -> ir.Value:
        """Apply `compute` to `size` bytes of each vector at a time, and join the results."""
        parts = [self._split(vector, size) for vector in vectors]
        done = [compute(*part) for part in zip(*parts, strict=True)]
        while len(done) > 1:
            lanes = ir.Constant(ir.VectorType(I32, 2 * done[0].type.count), list(range(2 * done[0].type.count)))
            done = [self.b.shuffle_vector(done[i], done[i + 1], lanes) for i in range(0, len(done), 2)]
        return done[0]

    def _split(self, vector: ir.Value, size: int) -> list[ir.Value]:
        lanes = size * 8 // vector.type.element.width
        if lanes == vector.type.count:
            return [vector]
        kind = ir.VectorType(I32, lanes)
        return [
            self.b.shuffle_vector(vector, vector, ir.Constant(kind, list(range(start, start + lanes))))
            for start in range(0, vector.type.count, lanes)
        ]

    def _has(self, table: Table) -> bool:
        return self.target.has(*(feature for feature, _, _ in table))

    def _instruction(self, table: Table, at_most: int = 64) -> tuple[int, str]:
        """Return the vector size in bytes and the name of the table's first instruction that the target has."""
        return next((size, name) for feature, size, name in table if self.target.has(feature) and size <= at_most)

    def prefetch(self, address: ir.Value) -> None:
        self.call("llvm.prefetch.p0", ir.VoidType(), self.b.inttoptr(address, I8.as_pointer()), I32(0), I32(3), I32(1))

    def nearest(self, x: ir.Value) -> ir.Value:
        """Round to integers, halves to even; magnitudes must be below 2 ** 22."""
        if self.target.has("sse4.1", "neon"):
            return self.call("llvm.rint.v16f32", F32x16, x)
        whole = self.f(1.5 * 2**23)  # a float32 of this magnitude has no fraction bits, so the addition rounds
        return self.b.fsub(self.b.fadd(x, whole), whole)

    def larger(self, x: ir.Value, y: ir.Value) -> ir.Value:
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def smaller(self, x: ir.Value, y: ir.Value) -> ir.Value:
        return self.b.select(self.b.fcmp_ordered("<", x, y), x, y)

    def within(self, value: ir.Value, most: int) -> ir.Value:
        """Clamp an i64 to 0..`most`."""
        value = self.b.select(self.b.icmp_signed("<", value, I64(most)), value, I64(most))
        return self.b.select(self.b.icmp_signed(">", value, I64(0)), value, I64(0))

    def largest_magnitude(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """Return the largest magnitude in two vectors as one float32; NaN if any element is NaN."""
        return self.b.bitcast(self.reduce(self.magnitude_bits(x, y), self.larger_bits), F32)

    def magnitude_bits(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """Return the larger magnitude of each lane as int32 bits.

        The bits have the same order as the floats, and NaN is the largest.
        """
        return self.larger_bits(*(self.b.bitcast(self.call("llvm.fabs.v16f32", F32x16, v), I32x16) for v in (x, y)))

    def larger_bits(self, x: ir.Value, y: ir.Value) -> ir.Value:
        return self.b.select(self.b.icmp_signed(">", x, y), x, y)

    def reduce(self, vector: ir.Value, combine: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
        """Combine all lanes into one value, always in the same order: lane i with lane i + 8, then 4, 2, 1."""
        for half in (8, 4, 2, 1):
            turned = ir.Constant(I32x16, [(lane + half) % LANES for lane in range(LANES)])
            vector = combine(vector, self.b.shuffle_vector(vector, vector, turned))
        return self.b.extract_element(vector, I32(0))

    def exp(self, x: ir.Value) -> ir.Value:
        """Return e ** x, with a relative error of 7e-6 for x up to 87; below -87 it is e ** -87.

        It is 2 ** n times a polynomial, whose coefficients minimize the error over half a unit either side of 0.
        """
        t = self.b.fmul(self.larger(x, self.f(-87)), self.f(1.4426950408889634))
        n = self.nearest(t)
        r, p = self.b.fsub(t, n), self.f(0.0013333558)
        for coefficient in (0.009618129, 0.05550411, 0.2402265, 0.6931472, 1.0):
            p = self.fma(p, r, self.f(coefficient))
        power = self.b.shl(self.b.fptosi(n, I32x16), self.i(23))
        return self.b.bitcast(self.b.add(self.b.bitcast(p, I32x16), power), F32x16)


def _shaped(element: ir.Type, like: ir.Type) -> ir.Type:
    """Return a vector type with as many elements as `like`, or the element type if `like` is a scalar."""
    return ir.VectorType(element, like.count) if isinstance(like, ir.VectorType) else element
