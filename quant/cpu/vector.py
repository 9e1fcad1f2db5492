"""Vector code in LLVM's intermediate language: how kernels are written, and how compiled Python calls them.

numba's own vectorizer gives 50 to 100 times less on quantized weights, so kernels spell their vectors out. A kernel is
a function of its own, compiled once (`native`), that code compiled by numba calls by name: as a part of its callers it
would be optimized again for each level of them. Every argument is an int64 (an address, a stride in bytes, a count):
nothing is left to type inference, and nothing is checked at run time, since whoever records an address has checked it.
There is no fast-math: a sum has one order, which is written down here, so that bits depend neither on threads nor on
how work is cut.

Knows one vector width, 16 lanes of float32, and AVX-512 VNNI. Refuses to know what is computed.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

Function = TypeVar("Function", bound=Callable[..., Any])

LANES = 16
REQUIRED_FEATURES = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni")

I8, I16, I32, I64, F16, F32 = (
    ir.IntType(8),
    ir.IntType(16),
    ir.IntType(32),
    ir.IntType(64),
    ir.HalfType(),
    ir.FloatType(),
)
I8x16, I8x64, I16x32 = ir.VectorType(I8, 16), ir.VectorType(I8, 64), ir.VectorType(I16, 32)
I16x16, I32x16, F16x16, F32x16 = (ir.VectorType(kind, LANES) for kind in (I16, I32, F16, F32))
F32x8 = ir.VectorType(F32, 8)
LANE_NUMBERS = ir.Constant(I32x16, list(range(LANES)))


def missing_features() -> tuple[str, ...]:
    """What this processor lacks of the instructions that the kernels are written in."""
    there = binding.get_host_cpu_features()
    return tuple(name for name in REQUIRED_FEATURES if not there.get(name, False))


def jit(function: Function) -> Function:
    """Compile with numba when first used: no GIL, no checks of divisions."""
    compiled: Function = njit(nogil=True, error_model="numpy")(function)
    return compiled


class Emit:
    """A thin layer over an IRBuilder: addresses are i64, and vectors have 16 lanes."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.b = builder

    def at(self, base: ir.Value, index: ir.Value | int, stride: int = 1) -> ir.Value:
        """base + index * stride, an address."""
        index = I64(index) if isinstance(index, int) else index
        return self.b.add(base, self.b.mul(index, I64(stride)) if stride != 1 else index)

    def load(self, address: ir.Value, kind: ir.Type = F32x16, align: int = 1) -> ir.Value:
        value = self.b.load(self.b.inttoptr(address, kind.as_pointer()))
        value.align = align
        return value

    def store(self, address: ir.Value, value: ir.Value, align: int = 1) -> None:
        self.b.store(value, self.b.inttoptr(address, value.type.as_pointer())).align = align

    def first_lanes(self, count: ir.Value) -> ir.Value:
        """A mask of the lanes below `count`, an i64."""
        return self.b.icmp_signed("<", LANE_NUMBERS, self.splat(self.b.trunc(count, I32)))

    def load_some(self, address: ir.Value, mask: ir.Value) -> ir.Value:
        """16 float32; memory of lanes outside of the mask is not touched, and they are 0."""
        pointer = self.b.inttoptr(address, F32x16.as_pointer())
        return self.call("llvm.masked.load.v16f32.p0", F32x16, pointer, I32(4), mask, self.f(0))

    def store_some(self, address: ir.Value, value: ir.Value, mask: ir.Value) -> None:
        pointer = self.b.inttoptr(address, F32x16.as_pointer())
        self.call("llvm.masked.store.v16f32.p0", ir.VoidType(), value, pointer, I32(4), mask)

    def f(self, value: float) -> ir.Constant:
        return ir.Constant(F32x16, [float(value)] * LANES)

    def i(self, value: int) -> ir.Constant:
        return ir.Constant(I32x16, [value] * LANES)

    def splat(self, scalar: ir.Value) -> ir.Value:
        kind = ir.VectorType(scalar.type, LANES)
        one = self.b.insert_element(ir.Constant(kind, ir.Undefined), scalar, I32(0))
        return self.b.shuffle_vector(one, one, self.i(0))

    def float_from_bits(self, bits: ir.Value) -> ir.Value:
        """The float32 whose bits are the low half of an i64."""
        return self.b.bitcast(self.b.trunc(bits, I32), F32)

    def variable(self, value: ir.Value) -> ir.Value:
        """A stack slot, which LLVM turns into a register."""
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
        return self.call("llvm.fma.v16f32", F32x16, x, y, z)

    def dot(self, total: ir.Value, unsigned: ir.Value, signed: ir.Value, bits: int = 8) -> ir.Value:
        """total + the dot products of four unsigned bytes below 2 ** bits and four signed ones in each lane."""
        return self.call("llvm.x86.avx512.vpdpbusd.512", I32x16, total, unsigned, signed)

    def lookup(self, codes: ir.Value, table: tuple[int, ...]) -> ir.Value:
        """table[code] of 64 bytes, each below 16."""
        return self.call("llvm.x86.avx512.pshuf.b.512", I8x64, ir.Constant(I8x64, list(table) * 4), codes)

    def widen(self, half: ir.Value) -> ir.Value:
        """float16 to float32, a vector or one number."""
        return self.b.fpext(half, F32x16 if isinstance(half.type, ir.VectorType) else F32)

    def prefetch(self, address: ir.Value) -> None:
        self.call("llvm.prefetch.p0", ir.VoidType(), self.b.inttoptr(address, I8.as_pointer()), I32(0), I32(3), I32(1))

    def nearest(self, x: ir.Value) -> ir.Value:
        """Rounded to whole numbers, halves to even."""
        return self.call("llvm.rint.v16f32", F32x16, x)

    def larger(self, x: ir.Value, y: ir.Value) -> ir.Value:
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def smaller(self, x: ir.Value, y: ir.Value) -> ir.Value:
        return self.b.select(self.b.fcmp_ordered("<", x, y), x, y)

    def within(self, value: ir.Value, most: int) -> ir.Value:
        """An i64, but at least 0 and at most `most`."""
        value = self.b.select(self.b.icmp_signed("<", value, I64(most)), value, I64(most))
        return self.b.select(self.b.icmp_signed(">", value, I64(0)), value, I64(0))

    def largest_magnitude(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """The largest magnitude in two vectors, one float32; NaN where there is one."""
        # As integers, magnitudes have the same order, and NaN is larger than all of them.
        bits = [self.b.bitcast(self.call("llvm.fabs.v16f32", F32x16, v), I32x16) for v in (x, y)]

        def larger(p: ir.Value, q: ir.Value) -> ir.Value:
            return self.b.select(self.b.icmp_signed(">", p, q), p, q)

        return self.b.bitcast(self.tree(larger(*bits), larger), F32)

    def tree(self, vector: ir.Value, combine: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
        """All lanes combined into one value, always in the same order: lane i with lane i + 8, then 4, 2, 1."""
        for half in (8, 4, 2, 1):
            turned = ir.Constant(I32x16, [(lane + half) % LANES for lane in range(LANES)])
            vector = combine(vector, self.b.shuffle_vector(vector, vector, turned))
        return self.b.extract_element(vector, I32(0))

    def exp(self, x: ir.Value) -> ir.Value:
        """e to the x, relative error 2e-6 for x up to 87; below -87 it is e to the -87.

        2 to the n times a polynomial (the coefficients minimize the error over half a unit either side of 0).
        """
        t = self.b.fmul(self.larger(x, self.f(-87)), self.f(1.4426950408889634))
        n = self.nearest(t)
        r, p = self.b.fsub(t, n), self.f(0.0013333558)
        for coefficient in (0.009618129, 0.05550411, 0.2402265, 0.6931472, 1.0):
            p = self.fma(p, r, self.f(coefficient))
        power = self.b.shl(self.b.fptosi(n, I32x16), self.i(23))
        return self.b.bitcast(self.b.add(self.b.bitcast(p, I32x16), power), F32x16)


@dataclass(frozen=True, slots=True)
class Kernel:
    """How a kernel's code is written, under the name that compiled code calls it by."""

    name: str
    build: Callable[..., Any]
    returns: bool

    @property
    def parameters(self) -> list[str]:
        return list(inspect.signature(self.build).parameters)[1:]

    def emit(self, module: ir.Module) -> None:
        """Add the function to a module: int64 arguments, an int64 or nothing back."""
        kind = ir.FunctionType(I64 if self.returns else ir.VoidType(), [I64] * len(self.parameters))
        function = ir.Function(module, kind, self.name)
        builder = ir.IRBuilder(function.append_basic_block())
        result = self.build(Emit(builder), *function.args)
        builder.ret(result) if self.returns else builder.ret_void()


KERNELS: dict[str, Kernel] = {}  # all there are; filled while the modules that define them are imported


def kernel(build: Callable[..., Any]) -> Callable[..., Any]:
    """Turn build(emit, *int64 values) into a function of its own that compiled code calls.

    What `build` returns, an i64 or None, is what the function returns. Its name must be that of no other kernel.
    """
    made = Kernel(f"ingle_{build.__name__.lstrip('_')}", build, _returns(build))
    if made.name in KERNELS:
        raise ValueError(f"there are two kernels named {made.name}")
    KERNELS[made.name] = made
    signature = (types.int64 if made.returns else types.void)(*[types.int64] * len(made.parameters))
    called: Callable[..., Any] = types.ExternalFunction(made.name, signature)
    return called


def inlined(build: Callable[..., Any]) -> Callable[..., Any]:
    """Like `kernel`, for what is only a few instructions: they become part of the caller."""
    names = list(inspect.signature(build).parameters)[1:]
    returns = _returns(build)

    def define(typing_context: Any, *arguments: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: list[ir.Value]) -> Any:
            result = build(Emit(builder), *values)
            return result if returns else context.get_dummy_value()

        return (types.int64 if returns else types.void)(*[types.int64] * len(names)), generate

    define.__name__ = define.__qualname__ = build.__name__
    # numba folds the arguments of a call by this signature, and a plain *arguments fails there.
    parameters = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in ["typing_context", *names]]
    define.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    compiled: Callable[..., Any] = intrinsic(define)
    return compiled


def _returns(build: Callable[..., Any]) -> bool:
    return inspect.signature(build).return_annotation is not None


# -- memory


@inlined
def word(e: Emit, base: ir.Value, index: ir.Value) -> ir.Value:
    """The int64 number `index` of an array."""
    return e.load(e.at(base, index, 8), I64, 8)
