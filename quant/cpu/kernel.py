"""Kernels: functions written in vector code, and how code compiled by numba calls them.

A kernel is a separate function, compiled once (`quant.cpu.native`), which code compiled by numba calls by name. If it
were inlined, it would be optimized again for each level of callers. Every argument is an int64: an address, a stride in
bytes, or a count. So calls do not depend on type inference. Kernels check nothing at run time, because addresses are
checked when a program is recorded.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from quant.cpu import tiers
from quant.cpu.tiers import Target
from quant.cpu.vector import I64, Emit

Function = TypeVar("Function", bound=Callable[..., Any])

CACHE_LINE = 64  # size of a cache line in bytes
CORE = "core"  # name of the code part that every process loads


def jit(function: Function) -> Function:
    """Compile with numba at first use, without the GIL and without division checks."""
    compiled: Function = njit(nogil=True, error_model="numpy")(function)
    return compiled


@dataclass(frozen=True, slots=True)
class Kernel:
    """The generator of a kernel's code, and the name under which compiled code calls it.

    All kernels of one `part` are compiled to one file.
    """

    name: str
    build: Callable[..., Any]
    returns: bool
    part: str = CORE

    @property
    def parameters(self) -> list[str]:
        return list(inspect.signature(self.build).parameters)[1:]

    def emit(self, module: ir.Module, target: Target) -> None:
        """Add the function to a module. It takes int64 arguments and returns an int64 or nothing."""
        kind = ir.FunctionType(I64 if self.returns else ir.VoidType(), [I64] * len(self.parameters))
        function = ir.Function(module, kind, self.name)
        # llvmlite writes alignstack only if the function also has another attribute
        function.attributes.add("nounwind")
        function.attributes.alignstack = CACHE_LINE  # without it, vectors spilled to the stack would cross cache lines
        builder = ir.IRBuilder(function.append_basic_block())
        result = self.build(Emit(builder, target), *function.args)
        builder.ret(result) if self.returns else builder.ret_void()


KERNELS: dict[str, Kernel] = {}  # all kernels; filled when the modules that define them are imported


def kernel(build: Callable[..., Any], part: str = CORE) -> Callable[..., Any]:
    """Register build(emit, *int64 values) as a kernel, and return the function for compiled code to call.

    The kernel returns what `build` returns: an i64 or None. Compiled Python calls kernels of the core by name; kernels
    of other parts must be called by address. Raises ValueError for a name that another kernel has.
    """
    made = Kernel(f"ingle_{build.__name__.lstrip('_')}", build, _returns(build), part)
    if made.name in KERNELS:
        raise ValueError(f"two kernels are named {made.name}")
    KERNELS[made.name] = made
    signature = (types.int64 if made.returns else types.void)(*[types.int64] * len(made.parameters))
    called: Callable[..., Any] = types.ExternalFunction(made.name, signature)
    return called


def inlined(build: Callable[..., Any]) -> Callable[..., Any]:
    """Like `kernel`, for a few instructions that are inlined into the caller."""
    names = list(inspect.signature(build).parameters)[1:]
    returns = _returns(build)

    def define(typing_context: Any, *arguments: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: list[ir.Value]) -> Any:
            result = build(Emit(builder, tiers.choose("auto")), *values)
            return result if returns else context.get_dummy_value()

        return (types.int64 if returns else types.void)(*[types.int64] * len(names)), generate

    define.__name__ = define.__qualname__ = build.__name__
    # numba folds the arguments of a call by this signature, and fails for a plain *arguments.
    parameters = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in ["typing_context", *names]]
    define.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    compiled: Callable[..., Any] = intrinsic(define)
    return compiled


def _returns(build: Callable[..., Any]) -> bool:
    return inspect.signature(build).return_annotation is not None


@inlined
def word(e: Emit, base: ir.Value, index: ir.Value) -> ir.Value:
    """Return the int64 at `index` of an array."""
    return e.load(e.at(base, index, 8), I64, 8)


@intrinsic  # type: ignore[untyped-decorator]
def pointer(typing_context: Any, address: Any) -> Any:
    """Convert an address to a void pointer for `carray`."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: list[ir.Value]) -> ir.Value:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate
