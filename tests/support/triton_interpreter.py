"""Patch Triton's interpreter, which treats the bits of bfloat16 and 8-bit floats as integers, and speed it up.

`install` patches this process, for Triton 3.6 to 3.7: conversions round as on a GPU, e4m3 saturates, and matrix
products use the values. Unsupported operations raise an error: sums over bfloat16 must be computed in float32. The
interpreter spends most of its time on creating types and shapes again, so these are cached.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from quant.kernels import early_start

FLOATS = {
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
SIGNED = {
    1: (np.uint8, torch.uint8),
    2: (np.int16, torch.int16),
    4: (np.int32, torch.int32),
    8: (np.int64, torch.int64),
}
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
BITWISE = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)

_builder, _handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
_convert, _dot, _cast = interpreter._convert_float, _builder.create_dot, _builder.cast_impl
_binary, _unary = _builder.binary_op, _builder.unary_op
_reduce, _patch = interpreter.ReduceScanOpInterface.apply, interpreter._patch_lang_tensor
_launch, _function = interpreter.GridExecutor.__call__, interpreter.InterpretedFunction
_block, _tensor_of = tl.block_type.__init__, tl.tensor.__init__
_numpy_type = interpreter._get_np_dtype
_prepared: set[tuple[bool, ...]] = set()
_numpy_types: dict[str, Any] = {}
_block_types: dict[tuple[Any, ...], dict[str, Any]] = {}


def _tensor(data: Any, kind: Any) -> torch.Tensor:
    """Return the values that the raw bits encode in the type `kind`."""
    bits = np.ascontiguousarray(data)
    return torch.from_numpy(bits.view(SIGNED[bits.itemsize][0]).copy()).view(FLOATS[kind]).reshape(np.shape(data))


def _values(handle: Any) -> Any:
    return _tensor(handle.data, handle.dtype.scalar).float().numpy()


def _is_bfloat(*handles: Any) -> bool:
    return any(getattr(it, "dtype", None) is not None and it.dtype.scalar == tl.bfloat16 for it in handles)


def _converted(data: Any, source: Any, target: Any, *rest: Any, **options: Any) -> Any:
    source, target = source.scalar, target.scalar
    if source not in FLOATS or target not in FLOATS:
        return _convert(data, source, target, *rest, **options)
    values = _tensor(data, source).float()
    if target in (tl.float8e4nv, tl.float8e5):
        most = torch.finfo(FLOATS[target]).max
        values = values.clamp(-most, most)  # NaN stays NaN
    bits = values.to(FLOATS[target]).contiguous()
    size = bits.element_size()
    return bits.view(SIGNED[size][1]).numpy().view(UNSIGNED[size]).reshape(np.shape(data))


def _bfloat(values: Any) -> Any:
    return _handle(_converted(np.asarray(values, np.float32), tl.float32, tl.bfloat16), tl.bfloat16)


def _dotted(self: Any, a: Any, b: Any, accumulator: Any, *rest: Any) -> Any:
    if accumulator.dtype.scalar == tl.bfloat16:
        raise TypeError("sums of products must be float32")
    if not all(it.dtype.scalar in FLOATS for it in (a, b)):
        return _dot(self, a, b, accumulator, *rest)
    # in float64, because BLAS may sum the rows of one matrix in different orders, and a GPU does not
    product = np.matmul(_values(a).astype(np.float64), _values(b).astype(np.float64)) + accumulator.data
    return _handle(product.astype(accumulator.data.dtype), accumulator.dtype.scalar)


def _cast_to(self: Any, source: Any, target: Any) -> Any:
    old, new = source.dtype.scalar, target.scalar
    if old in FLOATS and new in FLOATS and old != new and tl.bfloat16 in (old, new):
        return _handle(_converted(source.data, old, new).view(interpreter._get_np_dtype(target)), new)
    if new == tl.bfloat16 and old not in FLOATS:
        return _bfloat(source.data)
    if old == tl.bfloat16 and new not in FLOATS:
        return _handle(_values(source).astype(interpreter._get_np_dtype(target)), new)
    return _cast(self, source, target)


def _binary_op(self: Any, left: Any, right: Any, op: Any) -> Any:
    if not _is_bfloat(left, right) or op in BITWISE:
        return _binary(self, left, right, op)
    result = op(_values(left), _values(right))
    return _handle(result, tl.int1) if result.dtype == np.bool_ else _bfloat(result)


def _unary_op(self: Any, operand: Any, op: Any) -> Any:
    return _bfloat(op(_values(operand))) if _is_bfloat(operand) else _unary(self, operand, op)


def _reduced(self: Any, operand: Any) -> Any:
    if _is_bfloat(*(operand if isinstance(operand, tuple) else (operand,))):
        raise TypeError("sums and maxima over bfloat16 must be computed in float32")
    return _reduce(self, operand)


def _patched(tensor: Any, *rest: Any) -> Any:
    """Make a tensor of one element usable as an index, for numpy 2.4 with Triton 3.6."""
    result = _patch(tensor, *rest)

    def index(self: Any) -> int:
        return int(np.asarray(self.handle.data).reshape(-1)[0])

    if rest and hasattr(rest[0], "set_attr"):
        rest[0].set_attr(tensor, "__index__", index)
    else:
        tensor.__index__ = index
    return result


def _launched(self: Any, *arguments: Any, **options: Any) -> Any:
    _prepared.clear()  # each launch reverts the changes to the language
    return _launch(self, *arguments, **options)


def _called(self: Any, *arguments: Any, **options: Any) -> Any:
    """Call a function from a kernel. Prepare the language only once, because that is slower than the call."""
    modules = tuple(any(it is module for it in self.fn.__globals__.values()) for module in (tl, tl.core))
    if modules not in _prepared:
        interpreter._patch_lang(self.fn)
        _prepared.add(modules)
    return self.rewrite()(*arguments, **options)


def _same_type(self: Any, element_ty: Any, shape: Any) -> None:
    """Let equal block types share their attributes, including the shape of their tensors."""
    key = element_ty.name, *map(tl.core._unwrap_if_constexpr, shape)
    if key not in _block_types:
        _block(self, element_ty, shape)
        _block_types[key] = self.__dict__
    self.__dict__ = _block_types[key]


def _same_shape(self: Any, handle: Any, kind: Any) -> None:
    about = kind.__dict__
    if "of_tensors" not in about:
        _tensor_of(self, handle, kind)
        about["of_tensors"] = self.shape, self.numel
    self.handle, self.type, self.dtype = handle, kind, kind.scalar
    self.shape, self.numel = about["of_tensors"]


def _same_numpy_type(kind: Any) -> Any:
    name = kind.scalar.name
    if name not in _numpy_types:
        _numpy_types[name] = _numpy_type(kind)
    return _numpy_types[name]


def _assembled(self: Any, text: str, constraints: str, values: Sequence[Any], *rest: Any) -> Any:
    """Do nothing for a prefetch, whose result is not used."""
    if not text.startswith("prefetch"):
        raise NotImplementedError(f"the interpreter has no assembly: {text}")
    return SimpleNamespace(get_result=lambda index: _handle(np.zeros(values[0].data.shape, np.int32), tl.int32))


def install() -> None:
    """Patch the interpreter of this process. Repeated calls have no effect."""
    _builder.create_inline_asm = _assembled
    # kernels run one after the other, so there is nothing to wait for
    for name in ("gdc_wait", "gdc_launch_dependents"):
        setattr(early_start, name, lambda: None)
    interpreter._convert_float = _converted
    _builder.create_dot, _builder.cast_impl = _dotted, _cast_to
    _builder.binary_op, _builder.unary_op = _binary_op, _unary_op
    interpreter.ReduceScanOpInterface.apply = _reduced
    interpreter._patch_lang_tensor = _patched
    interpreter.GridExecutor.__call__, _function.__call__ = _launched, _called
    tl.block_type.__init__, tl.tensor.__init__ = _same_type, _same_shape
    interpreter._get_np_dtype = _same_numpy_type
    for name in ("si_to_fp", "ui_to_fp", "fp_to_si", "fp_to_ui", "fp_ext", "fp_trunc"):
        setattr(_builder, f"create_{name}", lambda self, source, target: self.cast_impl(source, target))


def truncated(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Return float32 values with their first `bits` significant bits."""
    return (values.view(torch.int32) & (-1 << 24 - bits)).view(torch.float32)


@contextmanager
def short_sums(bits: int) -> Iterator[None]:
    """Let matrix products of 8-bit floats keep `bits` bits of a sum, as the matrix units of some GPUs do.

    A matrix instruction multiplies 32 columns.
    """

    def dotted(self: Any, a: Any, b: Any, accumulator: Any, *rest: Any) -> Any:
        if a.dtype.scalar != tl.float8e4nv:
            return _dotted(self, a, b, accumulator, *rest)
        left, right = (_tensor(it.data, it.dtype.scalar).float() for it in (a, b))
        total = torch.from_numpy(accumulator.data)
        for start in range(0, len(right), 32):
            total = truncated(total + left[:, start : start + 32] @ right[start : start + 32], bits)
        return _handle(total.numpy(), accumulator.dtype.scalar)

    with mock.patch.object(_builder, "create_dot", dotted):
        yield


@contextmanager
def programs_in_order(order: Callable[[int], Sequence[int]]) -> Iterator[None]:
    """Run the programs of kernels in another order. `order` takes their number, and returns a permutation of them.

    A GPU runs programs in any order, and at the same time. A kernel whose results depend on the order has a race.
    """
    builder = interpreter.interpreter_builder
    set_dimensions, set_index = type(builder).set_grid_dim, type(builder).set_grid_idx
    places: list[int] = []

    def dimensions(*grid: int) -> None:
        set_dimensions(builder, *grid)
        places[:] = order(math.prod(grid))

    def index(x: int, y: int, z: int) -> None:
        _, columns, depth = builder.grid_dim
        place = places[(x * columns + y) * depth + z]
        set_index(builder, place // (columns * depth), place // depth % columns, place % depth)

    with mock.patch.object(builder, "set_grid_dim", dimensions), mock.patch.object(builder, "set_grid_idx", index):
        yield
