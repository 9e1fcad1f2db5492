"""Activations as a matmul reads them: a row of floats, or of integers in groups of 32 columns.

A quantized row is x = scale * (128 * high + low), with one scale for each group: two planes of signed bytes, about 14
bits. With one plane it is x = scale * high. The sum of a group and that of its first 16 columns travel along, as
integers and times the scale: they are what a weight's zero point or minimum is multiplied by.

    [high: K bytes] [low: K bytes] then, K / 32 words each:
    [scale] [scale * sum] [scale * first sum] as float32, [sum] [first sum] as int32

One plane is what most integer engines use (ggml's Q8_1): with 4-bit weights it moves log-probabilities by about 0.12
(root mean square), the second plane brings that to 0.002 for about a fifth of the time of a long prompt.
Knows rows. Refuses to know weights.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from numba.core import cgutils

from quant.cpu.kernel import inlined, kernel
from quant.cpu.vector import F32, I32, I64, Emit, I8x16, I32x16

GROUP = 32  # columns that share a scale


class Form(IntEnum):
    """What a row is made of. The value is a word of recorded programs."""

    FLOAT = 0
    ONE_PLANE = 1
    TWO_PLANES = 2


def row_bytes(form: Form, width: int) -> int:
    """Bytes of a row of `width` columns, a multiple of GROUP."""
    return 4 * width if form is Form.FLOAT else 2 * width + 5 * width // 8


def _quantize_group(e: Emit, low: Any, high: Any, row: Any, groups: Any, g: Any, planes: int) -> None:
    """Write group `g` of a quantized row: columns 0 to 15 of it in `low`, 16 to 31 in `high`."""
    b, steps = e.b, 127 * 128 if planes == 2 else 127
    top = e.largest_magnitude(low, high)
    inverse = e.splat(b.select(b.fcmp_ordered(">", top, F32(0)), b.fdiv(F32(steps), top), F32(0)))
    scale = b.fmul(top, F32(1 / steps))
    whole = [b.fptosi(e.nearest(b.fmul(v, inverse)), I32x16) for v in (low, high)]
    for half, v in enumerate(whole):
        at = e.at(e.at(row, g, GROUP), 16 * half)
        upper = b.ashr(b.add(v, e.i(64)), e.i(7)) if planes == 2 else v
        e.store(at, b.trunc(upper, I8x16))
        if planes == 2:
            e.store(e.at(at, groups, GROUP), b.trunc(b.sub(v, b.shl(upper, e.i(7))), I8x16))
    scale_at = e.at(e.at(row, groups, 2 * GROUP), g, 4)
    e.store(scale_at, scale)
    sums = b.add(*whole), whole[0]
    for place, numbers in enumerate(sums):
        total = e.tree(numbers, b.add)
        e.store(e.at(scale_at, groups, 4 * (1 + place)), b.fmul(scale, b.sitofp(total, F32)))
        e.store(e.at(scale_at, groups, 4 * (3 + place)), total)


def _write_group(e: Emit, form: Form, low: Any, high: Any, row: Any, groups: Any, g: Any) -> None:
    if form is Form.FLOAT:
        at = e.at(row, g, 4 * GROUP)
        e.store(at, low)
        e.store(e.at(at, 64), high)
    else:
        _quantize_group(e, low, high, row, groups, g, int(form))


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Group `g` of a quantized row, as a matmul reads it: each value in all lanes."""

    e: Emit
    row: Any
    groups: Any
    g: Any

    def columns(self, plane: int, chunk: int) -> Any:
        """Columns 4 * chunk to 4 * chunk + 3 of a plane, in each lane."""
        at = self.e.at(self.row, self.groups, GROUP * plane) if plane else self.row
        return self.e.splat(self.e.load(self.e.at(self.e.at(at, self.g, GROUP), 4 * chunk), I32))

    def scale(self) -> Any:
        return self.e.splat(self._word(0, F32))

    def sum(self, half: int, halves: int) -> Any:
        """scale * sum of the columns of a half, or of all where there is one `half`; float32."""
        whole, first = self._word(1, F32), self._word(2, F32)
        return self.e.splat(whole if halves == 1 else self.e.b.fsub(whole, first) if half else first)

    def integer_sum(self, half: int, halves: int, factor: int) -> Any:
        """The same without the scale, as integers times `factor`."""
        b, whole, first = self.e.b, self._word(3, I32), self._word(4, I32)
        total = whole if halves == 1 else b.sub(whole, first) if half else first
        return self.e.splat(b.mul(total, I32(factor)))

    def _word(self, array: int, kind: Any) -> Any:
        at = self.e.at(self.row, self.groups, 2 * GROUP + 4 * array)
        return self.e.load(self.e.at(at, self.g, 4), kind)


@kernel
def norm_factor(e: Emit, x: Any, groups: Any, epsilon: Any) -> Any:
    """1 / the root mean square of a float row of 32 * groups columns (arXiv:1910.07467), as bits; so is epsilon."""
    b = e.b
    squares = [e.variable(e.f(0)) for _ in range(2)]
    with cgutils.for_range(b, groups) as loop:
        for half, total in enumerate(squares):
            v = e.load(e.at(e.at(x, loop.index, 4 * GROUP), 64 * half))
            b.store(e.fma(v, v, b.load(total)), total)
    total = e.tree(b.fadd(b.load(squares[0]), b.load(squares[1])), b.fadd)
    mean = b.fdiv(total, b.sitofp(b.mul(groups, I64(GROUP)), F32))
    root = e.call("llvm.sqrt.f32", F32, b.fadd(mean, e.float_from_bits(epsilon)))
    return b.zext(b.bitcast(b.fdiv(F32(1), root), I32), I64)


def _make_scale_row(form: Form) -> Callable[..., None]:
    def scale_row(e: Emit, x: Any, factor: Any, weight: Any, groups: Any, out: Any) -> None:
        """A float row times `factor` (bits) and times the float vector at `weight`, written in `form`."""
        b, factors = e.b, e.splat(e.float_from_bits(factor))
        with cgutils.for_range(b, groups) as loop:
            pair = []
            for half in range(2):
                offset = e.at(b.mul(loop.index, I64(4 * GROUP)), 64 * half)
                scaled = b.fmul(e.load(b.add(x, offset)), factors)
                pair.append(b.fmul(scaled, e.load(b.add(weight, offset))))
            _write_group(e, form, pair[0], pair[1], out, groups, loop.index)

    scale_row.__name__ = f"scale_row_{form.name.lower()}"
    return kernel(scale_row)


def _make_write_row(form: Form) -> Callable[..., None]:
    def write_row(e: Emit, x: Any, groups: Any, out: Any) -> None:
        """A float row, written in `form`."""
        with cgutils.for_range(e.b, groups) as loop:
            at = e.at(x, loop.index, 4 * GROUP)
            _write_group(e, form, e.load(at), e.load(e.at(at, 64)), out, groups, loop.index)

    write_row.__name__ = f"write_row_{form.name.lower()}"
    return kernel(write_row)


def _make_silu_product(form: Form) -> Callable[..., None]:
    def silu_product(e: Emit, gate: Any, up: Any, group: Any, groups: Any, out: Any) -> None:
        """silu(gate) * up of 32 columns each (arXiv:2002.05202) -> group `group` of the row at out, in `form`."""
        b, done = e.b, []
        for half in range(2):
            g, u = e.load(e.at(gate, 64 * half)), e.load(e.at(up, 64 * half))
            minus = e.smaller(b.fsub(e.f(0), g), e.f(87))
            done.append(b.fdiv(b.fmul(g, u), b.fadd(e.f(1), e.exp(minus))))
        _write_group(e, form, done[0], done[1], out, groups, group)

    silu_product.__name__ = f"silu_product_{form.name.lower()}"
    return kernel(silu_product)


@dataclass(frozen=True, slots=True)
class FormKernels:
    """The kernels that write rows in one form, as compiled code calls them."""

    scale_row: Any
    write_row: Any
    silu_product: Any


FORM_KERNELS = {
    form: FormKernels(_make_scale_row(form), _make_write_row(form), _make_silu_product(form)) for form in Form
}


@inlined
def scale_row(e: Emit, kernel: Any, x: Any, factor: Any, weight: Any, groups: Any, out: Any) -> None:
    """Call a `scale_row` of FORM_KERNELS by its address."""
    e.call_address(kernel, x, factor, weight, groups, out)


@inlined
def write_row(e: Emit, kernel: Any, x: Any, groups: Any, out: Any) -> None:
    """Call a `write_row` of FORM_KERNELS by its address."""
    e.call_address(kernel, x, groups, out)


@inlined
def silu_product(e: Emit, kernel: Any, gate: Any, up: Any, group: Any, groups: Any, out: Any) -> None:
    """Call a `silu_product` of FORM_KERNELS by its address."""
    e.call_address(kernel, gate, up, group, groups, out)
