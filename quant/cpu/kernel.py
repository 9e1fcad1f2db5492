"""Kernels: functions written in vector code, and how compiled Python calls them.

A kernel is a function of its own, compiled once (`quant.cpu.native`), that code compiled by numba calls by name: as a
part of its callers it would be optimized again for each level of them. Every argument is an int64 (an address, a stride
in bytes, a count): nothing is left to type inference, and nothing is checked at run time, since whoever records an
address has checked it. Refuses to know which kernels there are.
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

CACHE_LINE = 64  # bytes
CORE = "core"  # the part that everyone needs


def jit(function: Function) -> Function:
    """Compile with numba when first used: no GIL, no checks of divisions."""
    compiled: Function = njit(nogil=True, error_model="numpy")(function)
    return compiled


@dataclass(frozen=True, slots=True)
class Kernel:
    """How a kernel's code is written, under the name that compiled code calls it by. A part is compiled together."""

    name: str
    build: Callable[..., Any]
    returns: bool
    part: str = CORE

    @property
    def parameters(self) -> list[str]:
        return list(inspect.signature(self.build).parameters)[1:]

    def emit(self, module: ir.Module, target: Target) -> None:
        """Add the function to a module: int64 arguments, an int64 or nothing back."""
        kind = ir.FunctionType(I64 if self.returns else ir.VoidType(), [I64] * len(self.parameters))
        function = ir.Function(module, kind, self.name)
        function.attributes.add("nounwind")  # llvmlite writes the next line's only beside another one
        function.attributes.alignstack = CACHE_LINE  # or vectors that wait on the stack would lie across two lines
        builder = ir.IRBuilder(function.append_basic_block())
        result = self.build(Emit(builder, target), *function.args)
        builder.ret(result) if self.returns else builder.ret_void()


KERNELS: dict[str, Kernel] = {}  # all there are; filled while the modules that define them are imported


def kernel(build: Callable[..., Any], part: str = CORE) -> Callable[..., Any]:
    """Turn build(emit, *int64 values) into a function of its own that compiled code calls.

    What `build` returns, an i64 or None, is what the function returns. Its name must be that of no other kernel.
    Compiled Python calls kernels of the core by name; those of other parts have to be called by their address.
    """
    made = Kernel(f"ingle_{build.__name__.lstrip('_')}", build, _returns(build), part)
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
            result = build(Emit(builder, tiers.choose("auto")), *values)
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


@inlined
def word(e: Emit, base: ir.Value, index: ir.Value) -> ir.Value:
    """The int64 number `index` of an array."""
    return e.load(e.at(base, index, 8), I64, 8)
