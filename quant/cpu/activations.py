"""Rows of activations as matrix products read them: floats, or integers in groups of 32 columns.

With 14 bits per value, x = scale * (128 * high + low), with one scale for each group and two planes of signed bytes.
With 8 bits per value, x = scale * high. Each group also stores its sum and the sum of its first 16 columns, both as
integers and multiplied by the scale. A weight's zero point or minimum is multiplied by these sums. For K columns:

    [high: K bytes] [low: K bytes] then, K / 32 words each:
    [scale] [scale * sum] [scale * first sum] as float32, [sum] [first sum] as int32

Most integer engines use 8 bits (ggml's Q8_1). With 4-bit weights that changes log-probabilities by about 0.12 (root
mean square). 14 bits reduce it to 0.002, but prefill of a long prompt then takes about a fifth longer.

For weights in super-blocks of 256 columns, 8-bit rows have one scale per 256 columns (ggml's Q8_K), so that a
product stays in integers up to the end of a super-block: x = scale * code.

    [codes: K bytes] [sums of 16 codes, times -32: K / 16 int32] [sums of 16: K / 16 int16]
    [sums of 32: K / 32 int16] [scales: K / 256 float32]

The sums times -32 are the initial value of a product of 16 columns if the zero point is 32 (Q6_K).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from numba.core import cgutils

from quant.cpu.kernel import inlined, kernel
from quant.cpu.vector import F32, I16, I32, I64, LANES, Emit, I8x16, I32x16

CLAMP, CLAMPED_SLOPE = 7.0, 1.702  # the limit of Gate.CLAMPED's inputs, and the factor of its exponent
GROUP = 32  # columns that share a scale
SUPER_BLOCK_GROUPS = 8  # groups in a super-block
ZERO = 32  # the zero point that the stored sums are multiplied by
GROUP_SUMS_BYTES = 2 * 4 + 2 * 2 + 2  # size of the sums of one group in bytes, in rows of super-blocks
STEPS_8, STEPS_14 = 127, 127 * 128  # the largest integers in rows of 8 and of 14 bits
PLANE_MAGNITUDES = 127, 64  # the largest magnitudes of bytes in the high and in the low plane


class Form(IntEnum):
    """The format of a row of activations. Recorded programs store it by its number."""

    FLOAT = 0
    BITS_8 = 1
    BITS_14 = 2
    SUPER_BLOCKS = 3

    @property
    def planes(self) -> int:
        return 2 if self is Form.BITS_14 else int(self is not Form.FLOAT)

    @property
    def columns(self) -> int:
        """Number of columns that are stored together. The row width must be a multiple of it."""
        return {Form.FLOAT: 1, Form.SUPER_BLOCKS: SUPER_BLOCK_GROUPS * GROUP}.get(self, GROUP)


def row_bytes(form: Form, width: int) -> int:
    """Return the size in bytes of a row of `width` columns. `width` must be a multiple of `form.columns`."""
    if form is Form.SUPER_BLOCKS:
        return width + (GROUP_SUMS_BYTES * SUPER_BLOCK_GROUPS + 4) * (width // (SUPER_BLOCK_GROUPS * GROUP))
    return 4 * width if form is Form.FLOAT else 2 * width + 5 * width // 8


Vectors = tuple[Any, Any]  # columns 0 to 15 of a group, and 16 to 31


def _scale(e: Emit, top: Any, steps: int) -> Vectors:
    """Return the scale of values up to magnitude `top`, and 1 / scale in all lanes."""
    b = e.b
    inverse = b.select(b.fcmp_ordered(">", top, F32(0)), b.fdiv(F32(steps), top), F32(0))
    return b.fmul(top, F32(1 / steps)), e.splat(inverse)


def _rounded(e: Emit, pair: Vectors, inverse: Any) -> list[Any]:
    """Return the values of a group divided by the scale, rounded to int32."""
    return [e.b.fptosi(e.nearest(e.b.fmul(v, inverse)), I32x16) for v in pair]


def _quantize_group(e: Emit, pair: Vectors, row: Any, groups: Any, g: Any, planes: int) -> None:
    """Write group `g` of a row of 8 or 14 bits."""
    b = e.b
    scale, inverse = _scale(e, e.largest_magnitude(*pair), STEPS_14 if planes == 2 else STEPS_8)
    numbers = _rounded(e, pair, inverse)
    for half, v in enumerate(numbers):
        at = e.at(e.at(row, g, GROUP), 16 * half)
        upper = b.ashr(b.add(v, e.i(64)), e.i(7)) if planes == 2 else v
        e.store(at, b.trunc(upper, I8x16))
        if planes == 2:
            e.store(e.at(at, groups, GROUP), b.trunc(b.sub(v, b.shl(upper, e.i(7))), I8x16))
    scale_at = e.at(e.at(row, groups, 2 * GROUP), g, 4)
    e.store(scale_at, scale)
    sums = b.add(*numbers), numbers[0]
    for index, lanes in enumerate(sums):
        total = e.reduce(lanes, b.add)
        e.store(e.at(scale_at, groups, 4 * (1 + index)), b.fmul(scale, b.sitofp(total, F32)))
        e.store(e.at(scale_at, groups, 4 * (3 + index)), total)


def _write_group(e: Emit, form: Form, pair: Vectors, row: Any, groups: Any, g: Any) -> None:
    if form is Form.FLOAT:
        at = e.at(row, g, 4 * GROUP)
        e.store(at, pair[0])
        e.store(e.at(at, 64), pair[1])
    else:
        _quantize_group(e, pair, row, groups, g, form.planes)


def _quantize_super_block(e: Emit, read: Callable[[Any], Vectors], row: Any, groups: Any, s: Any) -> None:
    """Write super-block `s` of a row.

    The groups are read twice, because sixteen vectors exceed some targets' registers.
    """
    b, block = e.b, SuperBlock(e, row, groups, s)
    top = e.variable(e.i(0))
    b.store(e.i(0), top)
    with block.each_group() as group:
        b.store(e.larger_bits(b.load(top), e.magnitude_bits(*read(group.g))), top)
    scale, inverse = _scale(e, b.bitcast(e.reduce(b.load(top), e.larger_bits), F32), STEPS_8)
    e.store(block.scale_at, scale)
    with block.each_group() as group:
        numbers = _rounded(e, read(group.g), inverse)
        sums = [e.reduce(lanes, b.add) for lanes in numbers]
        for half in range(2):
            e.store(e.at(group.numbers_at, GROUP // 2 * half), b.trunc(numbers[half], I8x16))
            e.store(e.at(group.starts_at, 4 * half), b.mul(sums[half], I32(-ZERO)))
            e.store(e.at(group.half_sums_at, 2 * half), b.trunc(sums[half], I16))
        e.store(group.sum_at, b.trunc(b.add(*sums), I16))


def _write_row(e: Emit, form: Form, read: Callable[[Any], Vectors], row: Any, groups: Any) -> None:
    """Write a row. `read` returns the values of a group."""
    super_blocks = form is Form.SUPER_BLOCKS
    with cgutils.for_range(e.b, e.b.sdiv(groups, I64(SUPER_BLOCK_GROUPS)) if super_blocks else groups) as loop:
        if super_blocks:
            _quantize_super_block(e, read, row, groups, loop.index)
        else:
            _write_group(e, form, read(loop.index), row, groups, loop.index)


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Reads group `g` of a row of 8 or 14 bits. Each value is returned in all lanes."""

    e: Emit
    row: Any
    groups: Any
    g: Any

    def columns(self, plane: int, chunk: int) -> Any:
        """Return columns 4 * chunk to 4 * chunk + 3 of a plane, in each lane."""
        at = self.e.at(self.row, self.groups, GROUP * plane) if plane else self.row
        return self.e.splat(self.e.load(self.e.at(self.e.at(at, self.g, GROUP), 4 * chunk), I32))

    def scale(self) -> Any:
        return self.e.splat(self._word(0, F32))

    def sum(self, half: int, halves: int) -> Any:
        """Return scale * sum of the columns of a half, or of the group if `halves` is 1; float32."""
        both, first = self._word(1, F32), self._word(2, F32)
        return self.e.splat(both if halves == 1 else self.e.b.fsub(both, first) if half else first)

    def integer_sum(self, half: int, halves: int, factor: int) -> Any:
        """Return the sum of the integer codes of a half, or of the group if `halves` is 1, times `factor`."""
        b, both, first = self.e.b, self._word(3, I32), self._word(4, I32)
        total = both if halves == 1 else b.sub(both, first) if half else first
        return self.e.splat(b.mul(total, I32(factor)))

    def _word(self, array: int, kind: Any) -> Any:
        at = self.e.at(self.row, self.groups, 2 * GROUP + 4 * array)
        return self.e.load(self.e.at(at, self.g, 4), kind)


@dataclass(frozen=True, slots=True)
class SuperGroup:
    """Addresses and values of group `g` of a row in super-blocks. Each value is returned in all lanes."""

    e: Emit
    row: Any
    groups: Any
    g: Any

    @property
    def numbers_at(self) -> Any:
        return self.e.at(self.row, self.g, GROUP)

    @property
    def starts_at(self) -> Any:
        return self.e.at(self.e.at(self.row, self.groups, GROUP), self.g, 8)

    @property
    def half_sums_at(self) -> Any:
        return self.e.at(self.e.at(self.row, self.groups, GROUP + 8), self.g, 4)

    @property
    def sum_at(self) -> Any:
        return self.e.at(self.e.at(self.row, self.groups, GROUP + 8 + 4), self.g, 2)

    def columns(self, plane: int, chunk: int) -> Any:
        """Return columns 4 * chunk to 4 * chunk + 3, in each lane."""
        return self.e.splat(self.e.load(self.e.at(self.numbers_at, 4 * chunk), I32))

    def integer_sum(self, half: int, halves: int, factor: int) -> Any:
        """Return the sum of the columns of a half, or of the group if `halves` is 1, times `factor`."""
        e, b = self.e, self.e.b
        if halves == 1:
            return e.splat(b.mul(b.sext(e.load(self.sum_at, I16), I32), I32(factor)))
        return b.ashr(e.splat(e.load(e.at(self.starts_at, 4 * half), I32)), e.i((-ZERO // factor).bit_length() - 1))


@dataclass(frozen=True, slots=True)
class SuperBlock:
    """Super-block `s` of a row of activations."""

    e: Emit
    row: Any
    groups: Any
    s: Any

    @property
    def scale_at(self) -> Any:
        return self.e.at(self.e.at(self.row, self.groups, GROUP + GROUP_SUMS_BYTES), self.s, 4)

    def scale(self) -> Any:
        return self.e.splat(self.e.load(self.scale_at, F32))

    def group(self, number: Any) -> SuperGroup:
        """Return group `number` of the super-block, from 0 to SUPER_BLOCK_GROUPS - 1."""
        return SuperGroup(
            self.e, self.row, self.groups, self.e.b.add(self.e.b.mul(self.s, I64(SUPER_BLOCK_GROUPS)), number)
        )

    @contextmanager
    def each_group(self) -> Iterator[SuperGroup]:
        with cgutils.for_range(self.e.b, I64(SUPER_BLOCK_GROUPS)) as loop:
            yield self.group(loop.index)

    def two_sums(self, number: int, halves: int) -> Any:
        """Return a pair of adjacent sums, with the indices 2 * number and 2 * number + 1.

        They are sums of half groups, or of groups if `halves` is 1. Each lane has both sums, as adjacent int16.
        """
        at = self.group(I64(number)).half_sums_at if halves == 2 else self.group(I64(2 * number)).sum_at
        return self.e.splat(self.e.load(at, I32))


@kernel
def take_columns(e: Emit, x: Any, order: Any, groups: Any, out: Any) -> None:
    """Write the columns of a float row to `out`, in the order of the int32 indices at `order`."""
    with cgutils.for_range(e.b, e.b.mul(groups, I64(GROUP // LANES))) as loop:
        at = e.at(order, loop.index, 4 * LANES)
        columns = [e.b.zext(e.load(e.at(at, 4 * lane), I32), I64) for lane in range(LANES)]
        e.store(e.at(out, loop.index, 4 * LANES), e.gather([e.at(x, column, 4) for column in columns]))


def _make_scale_row(form: Form) -> Callable[..., None]:
    def scale_row(e: Emit, x: Any, factor: Any, weight: Any, groups: Any, out: Any) -> None:
        """Multiply a float row by `factor` (float32 bits) and the float vector at `weight`, and write it in `form`."""
        b, factors = e.b, e.splat(e.float_from_bits(factor))

        def read(g: Any) -> Vectors:
            low, high = (
                b.fmul(b.fmul(e.load(e.at(x, offset)), factors), e.load(e.at(weight, offset)))
                for offset in (e.at(b.mul(g, I64(4 * GROUP)), 64 * half) for half in range(2))
            )
            return low, high

        _write_row(e, form, read, out, groups)

    scale_row.__name__ = f"scale_row_{form.name.lower()}"
    return kernel(scale_row)


def _make_write_row(form: Form) -> Callable[..., None]:
    def write_row(e: Emit, x: Any, groups: Any, out: Any) -> None:
        """Write a float row in `form`."""

        def read(g: Any) -> Vectors:
            at = e.at(x, g, 4 * GROUP)
            return e.load(at), e.load(e.at(at, 64))

        _write_row(e, form, read, out, groups)

    write_row.__name__ = f"write_row_{form.name.lower()}"
    return kernel(write_row)


@kernel
def add_scaled_row(e: Emit, x: Any, factor: Any, weight: Any, groups: Any, out: Any) -> None:
    """Multiply a float row by `factor` (float32 bits) and by the float vector at `weight`, and add it to the row at
    `out`.
    """
    b, factors = e.b, e.splat(e.float_from_bits(factor))
    with cgutils.for_range(b, b.mul(groups, I64(GROUP // LANES))) as loop:
        v, w, old = (e.load(e.at(base, loop.index, 64)) for base in (x, weight, out))
        e.store(e.at(out, loop.index, 64), b.fadd(old, b.fmul(b.fmul(v, factors), w)))


def _gelu_exponent(e: Emit, x: Any) -> Any:
    """Return the exponent of GELU's tanh approximation: sqrt(8 / pi) * (x + 0.044715 * x ** 3) (arXiv:1606.08415)."""
    b = e.b
    return b.fmul(x, e.fma(b.fmul(x, x), e.f(0.0713548163), e.f(1.5957691216)))


def _unchanged(_: Emit, gate: Any, up: Any) -> tuple[Any, Any]:
    return gate, up


def _clamped(e: Emit, gate: Any, up: Any) -> tuple[Any, Any]:
    most, least = e.f(CLAMP), e.f(-CLAMP)  # the first arguments, so that NaN remains NaN
    return e.smaller(most, gate), e.b.fadd(e.f(1), e.larger(least, e.smaller(most, up)))


@dataclass(frozen=True, slots=True)
class _Gate:
    """A gate has the form x / (1 + exp(-exponent(x))). `inputs` returns x and its factor from gate and up."""

    name: str
    exponent: Callable[[Emit, Any], Any]
    inputs: Callable[[Emit, Any, Any], tuple[Any, Any]] = _unchanged


def _make_gated_product(kind: _Gate, form: Form) -> Callable[..., None]:
    def gated_product(e: Emit, gate: Any, up: Any, group: Any, groups: Any, out: Any) -> None:
        """Write gate / (1 + exp(-exponent(gate))) * up of 32 columns as group `group` of the row at `out`, in `form`.

        See arXiv:2002.05202. The relative error is 1e-5, before quantization.
        """

        def product(half: int) -> Any:
            b = e.b
            g, u = kind.inputs(e, e.load(e.at(gate, 64 * half)), e.load(e.at(up, 64 * half)))
            minus = e.smaller(b.fsub(e.f(0), kind.exponent(e, g)), e.f(87))
            return b.fdiv(b.fmul(g, u), b.fadd(e.f(1), e.exp(minus)))

        _write_group(e, form, (product(0), product(1)), out, groups, group)

    gated_product.__name__ = f"{kind.name}_product_{form.name.lower()}"
    return kernel(gated_product)


def _make_gated_products(kind: _Gate) -> dict[Form, Any]:
    """Make the kernels for all forms except super-blocks, whose scale needs more than the 32 columns of a call."""
    return {form: _make_gated_product(kind, form) for form in Form if form is not Form.SUPER_BLOCKS}


@dataclass(frozen=True, slots=True)
class FormKernels:
    """The kernels that write rows in one form, as functions for compiled code."""

    scale_row: Any
    write_row: Any


FORM_KERNELS = {form: FormKernels(_make_scale_row(form), _make_write_row(form)) for form in Form}
SILU_PRODUCTS = _make_gated_products(_Gate("silu", lambda _, x: x))
GELU_PRODUCTS = _make_gated_products(_Gate("gelu", _gelu_exponent))
CLAMPED_PRODUCTS = _make_gated_products(_Gate("clamped", lambda e, x: e.b.fmul(x, e.f(CLAMPED_SLOPE)), _clamped))


@inlined
def scale_row(e: Emit, kernel: Any, x: Any, factor: Any, weight: Any, groups: Any, out: Any) -> None:
    """Call a `scale_row` of FORM_KERNELS by address."""
    e.call_address(kernel, x, factor, weight, groups, out)


@inlined
def write_row(e: Emit, kernel: Any, x: Any, groups: Any, out: Any) -> None:
    """Call a `write_row` of FORM_KERNELS by address."""
    e.call_address(kernel, x, groups, out)


@inlined
def gated_product(e: Emit, kernel: Any, gate: Any, up: Any, group: Any, groups: Any, out: Any) -> None:
    """Call one of SILU_PRODUCTS, GELU_PRODUCTS, or CLAMPED_PRODUCTS by address."""
    e.call_address(kernel, gate, up, group, groups, out)
