"""`Emit`: vector code in LLVM's intermediate language, in which kernels are written.

numba's own vectorizer is 50 to 100 times slower on quantized weights. So kernels are written for vectors of 16 lanes of
float32, which LLVM divides into the registers of the processor. `Emit` has the operations that need different
instructions on each tier; `integer_dots.py` and `float16.py` have larger ones. All tiers give the same bits, with one
exception: without fused multiply-adds, `fma` rounds twice. There is no fast-math: the order of every sum is defined
here, so that bits depend neither on threads nor on the division of work.
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

    def lookup(self, codes: ir.Value, table: Sequence[int]) -> ir.Value:
        """Look up bytes in a table of 16 bytes. `codes` has at least 16 bytes, each from 0 to 15."""
        b = self.b
        if self.has(_SHUFFLES):
            size, name = self.instruction(_SHUFFLES, at_most=codes.type.count)
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
        return self.apply(name, F32x16, partial(Emit._lookup_floats, table=table), codes)

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

    # -- division of vectors into register-sized parts

    def apply(self, name: str, kind: ir.Type, build: Callable[..., ir.Value], *args: ir.Value) -> ir.Value:
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

    def has(self, table: Table) -> bool:
        """Whether the target has one of the table's instructions."""
        return self.target.has(*(feature for feature, _, _ in table))

    def instruction(self, table: Table, at_most: int = 64) -> tuple[int, str]:
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
