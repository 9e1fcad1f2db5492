"""Activation rows in every format. Quantized rows equal numpy bit for bit, and computed rows are close to float64."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quant.cpu.activations import (
    CLAMPED_PRODUCTS,
    FORM_KERNELS,
    GELU_PRODUCTS,
    GROUP,
    SILU_PRODUCTS,
    Form,
    add_scaled_row,
    row_bytes,
    take_columns,
)
from quant.cpu.norms import norm_factor
from tests.quant.cpu.integer_reference import Floats, quantize
from tests.quant.cpu.kernel_call import bits_float, call, float_bits

SEED = 6
GUARD = 64
QUANTIZED = [Form.BITS_8, Form.BITS_14, Form.SUPER_BLOCKS]
SHARED = {form: form.columns for form in QUANTIZED}  # columns that share a scale
WIDTHS = [32, 64, 96, 576, 1056]
SIZES = [(form, width // 32 * form.columns) for form in QUANTIZED for width in WIDTHS[:4]]

pytestmark = pytest.mark.usefixtures("cpu_kernels")


class Row:
    """Memory for a row and a guard, filled with 0xFF: NaN as floats, and -1 as bytes."""

    def __init__(self, form: Form, width: int) -> None:
        self.form, self.width = form, width
        self.memory = np.full(row_bytes(form, width) + GUARD, 0xFF, np.uint8)

    def part(self, first: int, stop: int, kind: type[np.generic]) -> NDArray[np.generic]:
        return self.memory[first:stop].view(kind)

    @property
    def floats(self) -> Floats:
        return np.asarray(self.part(0, 4 * self.width, np.float32), np.float32)

    @property
    def numbers(self) -> NDArray[np.int64]:
        """The integers [groups, columns] that the planes represent."""
        planes = [self.part(self.width * plane, self.width * (plane + 1), np.int8) for plane in range(self.form.planes)]
        high, *low = (plane.astype(np.int64).reshape(-1, SHARED[self.form]) for plane in planes)
        return 128 * high + low[0] if low else high

    @property
    def scales(self) -> Floats:
        at, size = 2 * self.width, self.width // 8
        if self.form is Form.SUPER_BLOCKS:
            at, size = self.width + self.width * 7 // 16, self.width // 64
        return np.asarray(self.part(at, at + size, np.float32), np.float32)

    @property
    def sums(self) -> Floats:
        at, size = 2 * self.width + self.width // 8, self.width // 8
        return np.asarray(self.part(at, at + size, np.float32), np.float32)

    @property
    def integer_sums(self) -> tuple[NDArray[np.int64], ...]:
        """Sums of a row in super-blocks: of half groups times -32, of half groups, and of groups."""
        at, quarter = self.width, self.width // 4
        spans = ((at, 4, np.int32), (at + quarter, 2, np.int16), (at + quarter * 3 // 2, 1, np.int16))
        return tuple(
            self.part(first, first + size * quarter // 4, kind).astype(np.int64) for first, size, kind in spans
        )

    def check_guard(self) -> None:
        assert (self.memory[-GUARD:] == 0xFF).all()


def written(x: Floats, form: Form) -> Row:
    row = Row(form, len(x))
    call(FORM_KERNELS[form].write_row, np.ascontiguousarray(x), len(x) // GROUP, row.memory)
    row.check_guard()
    return row


def check_quantized(row: Row, x: Floats) -> None:
    """Check that every bit equals the integer reference."""
    expected = quantize(x[None], row.form)
    assert np.array_equal(row.numbers, expected.numbers[0])
    assert np.array_equal(row.scales, expected.scales[0])
    if row.form is Form.SUPER_BLOCKS:
        halves, groups = (expected.numbers.reshape(-1, size).sum(-1) for size in (GROUP // 2, GROUP))
        for found, sums in zip(row.integer_sums, (-32 * halves, halves, groups), strict=True):
            assert np.array_equal(found, sums)
    else:
        assert np.array_equal(row.sums, expected.sums[0])


@pytest.mark.parametrize(("form", "width"), SIZES)
def test_quantized_rows_equal_the_integer_reference(form: Form, width: int) -> None:
    rng = np.random.default_rng(SEED)
    for size in (1e-20, 1e-3, 1.0, 1e5, 1e30):
        x = (rng.standard_normal(width) * size).astype(np.float32)
        row = written(x, form)
        check_quantized(row, x)
        groups = x.reshape(-1, SHARED[form])
        step = np.abs(groups).max(-1, keepdims=True) / (127 * 128 if form is Form.BITS_14 else 127)
        values = row.numbers * row.scales[:, None].astype(np.float64)
        assert (np.abs(values - groups) <= 0.501 * step).all()


@pytest.mark.parametrize("form", QUANTIZED)
@pytest.mark.parametrize(
    "group",
    [
        np.zeros(32),
        -np.zeros(32),
        np.full(32, 3.0),
        np.full(32, -7e4),
        np.concatenate([np.zeros(31), [-1e30]]),
        np.concatenate([[3e38], np.ones(31)]),
        np.tile([1.0, -1.0], 16),
        np.arange(32) - 31.0,
        np.arange(32) * 0.5 / 127,  # halfway between two values
        np.concatenate([[127.0], np.arange(31) - 15.5]),  # halfway between two values, rounded to even
        np.concatenate([[16256.0], np.arange(31) * 64 - 32.0]),  # halfway between two values of the upper 8 bits
        np.linspace(-128 * 127, 128 * 127, 32),
    ],
    ids=lambda group: f"{group[0]:g}..{group[-1]:g}",
)
def test_extreme_groups_are_exact_and_do_not_affect_other_groups(form: Form, group: NDArray[np.float64]) -> None:
    rng, size = np.random.default_rng(SEED), SHARED[form]
    x = rng.standard_normal(3 * size).astype(np.float32)
    alone = written(x, form)
    x[size : 2 * size] = np.pad(group, (size - GROUP, 0))
    row = written(x, form)
    check_quantized(row, x)
    assert (np.abs(row.part(0, 3 * size, np.int8).astype(int)) <= 127).all()
    for index in (0, 2):
        assert np.array_equal(row.numbers[index], alone.numbers[index])
        assert row.scales[index] == alone.scales[index]


@pytest.mark.parametrize("form", QUANTIZED)
@pytest.mark.parametrize("size", [1e-45, 1e-42, 1e-40, 1e-38, 1e-36])
def test_subnormal_values_stay_near_zero(form: Form, size: float) -> None:
    """Near the smallest float32, a scale has no precision left. The results must still be nearly zero."""
    x = (np.random.default_rng(SEED).standard_normal(2 * SHARED[form]) * size).astype(np.float32)
    row = written(x, form)
    assert (np.abs(row.numbers) <= 128 * 128).all()
    assert (np.abs(row.numbers * row.scales[:, None].astype(np.float64)) <= 1e-34).all()
    if form is not Form.SUPER_BLOCKS:
        assert (np.abs(row.sums) <= 1e-34).all()


def test_float_activations_are_copied_bit_by_bit() -> None:
    x = np.random.default_rng(SEED).standard_normal(96).astype(np.float32)
    x[:4] = [np.inf, -np.inf, np.nan, -0.0]
    assert np.array_equal(written(x, Form.FLOAT).floats.view(np.int32), x.view(np.int32))


@pytest.mark.parametrize("width", WIDTHS)
def test_take_columns_reorders_a_row(width: int) -> None:
    rng = np.random.default_rng(SEED)
    x, order = rng.standard_normal(width, np.float32), rng.permutation(width).astype(np.int32)
    row = Row(Form.FLOAT, width)
    call(take_columns, x, order, width // GROUP, row.memory)
    assert np.array_equal(row.floats, x[order])
    row.check_guard()


@pytest.mark.parametrize("form", Form)
def test_nan_stays_nan(form: Form) -> None:
    """A NaN at any position makes the scale of its group NaN, so that a broken model does not seem to work."""
    rng, size = np.random.default_rng(SEED), SHARED.get(form, GROUP)
    for index in range(size, 2 * size):
        x = rng.standard_normal(3 * size).astype(np.float32)
        x[index] = np.nan
        row = written(x, form)
        if form is Form.FLOAT:
            assert np.isnan(row.floats[index])
        else:
            assert np.isnan(row.scales[1]), index
            assert np.isfinite(row.scales[[0, 2]]).all()


@pytest.mark.parametrize("form", QUANTIZED)
def test_infinity_gives_no_finite_scale(form: Form) -> None:
    x = np.ones(SHARED[form], np.float32)
    x[17] = np.inf
    assert not np.isfinite(written(x, form).scales[0])


@pytest.mark.parametrize(("form", "width"), [*((Form.FLOAT, width) for width in WIDTHS), *SIZES])
def test_rms_norm_writes_every_form(form: Form, width: int) -> None:
    rng = np.random.default_rng(SEED)
    epsilon = 1e-5
    for size in (1e-4, 1.0, 3e3):
        x = (rng.standard_normal(width) * size).astype(np.float32)
        weight = rng.standard_normal(width).astype(np.float32)
        factor = call(norm_factor, x, width // GROUP, float_bits(epsilon))
        exact = 1 / np.sqrt(np.mean(np.float64(x) ** 2) + epsilon)
        assert bits_float(factor) == pytest.approx(exact, rel=3e-7)
        row = Row(form, width)
        call(FORM_KERNELS[form].scale_row, x, factor, weight, width // GROUP, row.memory)
        row.check_guard()
        scaled = x * bits_float(factor) * weight
        if form is Form.FLOAT:
            assert np.array_equal(row.floats, scaled)
        else:
            check_quantized(row, scaled)


@pytest.mark.parametrize("width", WIDTHS)
def test_add_scaled_row_adds_to_the_output(width: int) -> None:
    rng = np.random.default_rng(SEED)
    x, weight, old = rng.standard_normal((3, width)).astype(np.float32)
    row = Row(Form.FLOAT, width)
    row.floats[:] = old
    call(add_scaled_row, x, float_bits(0.7), weight, width // GROUP, row.memory)
    row.check_guard()
    assert np.array_equal(row.floats, old + x * np.float32(0.7) * weight)


def silu(x: Any) -> Any:
    return x / (1 + np.exp(-np.maximum(x, -87)))


def gelu(x: Any) -> Any:
    """Compute GELU with tanh z = 2 / (1 + exp(-2 z)) - 1, which keeps precision if 1 + tanh z is small."""
    return x / (1 + np.exp(-np.maximum(np.sqrt(8 / np.pi) * (x + 0.044715 * x**3), -87)))


def clamped(gate: Any, up: Any) -> Any:
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    return gate / (1 + np.exp(-np.maximum(1.702 * gate, -87))) * (up + 1)


Gate = Callable[[Any, Any], Any]
GATES: dict[str, tuple[Gate, dict[Form, Any]]] = {
    "silu": (lambda gate, up: silu(gate) * up, SILU_PRODUCTS),
    "gelu": (lambda gate, up: gelu(gate) * up, GELU_PRODUCTS),
    "clamped": (clamped, CLAMPED_PRODUCTS),
}


@pytest.mark.parametrize("form", SILU_PRODUCTS)
@pytest.mark.parametrize("group", [0, 2])
@pytest.mark.parametrize("name", GATES)
def test_gated_product_writes_only_its_group(form: Form, group: int, name: str) -> None:
    rng, (exactly, products) = np.random.default_rng(SEED), GATES[name]
    gate, up = (rng.standard_normal((2, 32)) * 5).astype(np.float32)
    gate[:6] = [0.0, 80, -80, 300, -300, 1e30]
    exact = exactly(np.float64(gate), np.float64(up))
    row, plain = Row(form, 96), Row(Form.FLOAT, 96)
    for out in (row, plain):
        call(products[out.form], gate, up, group, 3, out.memory)
        out.check_guard()
    floats = plain.floats[32 * group : 32 * group + 32]
    np.testing.assert_allclose(floats, exact, rtol=1e-5, atol=1e-34)
    others = [number for number in range(3) if number != group]
    assert np.isnan(plain.floats.reshape(3, 32)[others]).all()
    if form is not Form.FLOAT:
        expected = quantize(floats[None], form)
        assert np.array_equal(row.numbers[group], expected.numbers[0, 0])
        assert row.scales[group] == expected.scales[0, 0]
        assert row.sums[group] == expected.sums[0, 0]
        assert np.isnan(row.scales[others]).all()
        assert (row.part(0, 96, np.int8).reshape(3, 32)[others] == -1).all()


def test_row_bytes_equal_the_layout_of_every_form() -> None:
    assert [row_bytes(form, 512) for form in Form] == [2048, 1344, 1344, 744]
