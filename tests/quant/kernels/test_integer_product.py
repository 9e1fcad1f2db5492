"""Products in 8-bit integers: the rounding of rows, and the product of rounded rows, compared with plain torch."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kernels.activations import gated
from engine.model_config import Gate
from quant.cuda.loading import to_device
from quant.cuda.matrix import PackedMatrix
from quant.kernels import reference
from quant.kernels.integer_product import integer_product
from quant.kernels.integer_rows import IntegerRows, integer_gated, integer_inputs, integer_weights
from quant.kernels.reference import SPAN, dequantize
from quant.tensor import CodedTensor, GroupedTensor
from tests.quant.cpu.random_group_weights import GROUP_TYPES, Coded
from tests.quant.cpu.random_weights import QUANTIZED, random_weight, width

pytestmark = pytest.mark.usefixtures("fenced_memory")

CODED = [*QUANTIZED, *(name for name, kind in GROUP_TYPES.items() if isinstance(kind, Coded))]
HALF_A_CODE = 0.5 + 1e-3  # largest error of a code, with that of float32


def matrix_of(name: str, rows: int, columns: int, device: torch.device) -> tuple[PackedMatrix, Tensor]:
    weight = random_weight(name, rows, columns, np.random.default_rng())
    matrix = to_device(weight, device)
    assert isinstance(matrix, PackedMatrix)
    values = dequantize(weight)
    return matrix, values if matrix.order is None else values[:, matrix.order.cpu()]


def values_of(rows: IntegerRows) -> Tensor:
    """Return the rounded rows, float64 [rows, columns]."""
    values = rows.codes.cpu().double() * rows.scales.cpu().double()[:, :, None]
    return values.permute(1, 0, 2).reshape(rows.count, -1)


def errors_of(rows: IntegerRows, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest error of each span and its largest value, float64 [rows, spans]."""
    spans = F.pad(values.double(), (0, rows.spans * SPAN - values.shape[1])).reshape(len(values), -1, SPAN)
    return (values_of(rows).reshape(spans.shape) - spans).abs().amax(2), spans.abs().amax(2)


def check_rounding(rows: IntegerRows, values: Tensor) -> None:
    errors, peaks = errors_of(rows, values)
    assert (errors <= HALF_A_CODE * peaks / 127 + 1e-12).all()
    largest = rows.codes.cpu().int().abs().amax(2).T
    assert ((largest == 127) | (peaks == 0)).all()


@pytest.mark.parametrize("columns", [160, 200])
@pytest.mark.parametrize("name", CODED)
def test_weights_of_every_type_are_as_exact_as_those_of_the_reference(
    name: str, columns: int, device: torch.device
) -> None:
    weight = random_weight(name, 40, columns if "channel" in name else width(name, columns), np.random.default_rng())
    matrix, values = to_device(weight, device), dequantize(weight)
    assert isinstance(matrix, PackedMatrix)
    assert isinstance(weight, CodedTensor | GroupedTensor)
    errors, peaks = errors_of(integer_weights(matrix), values)
    expected, _ = errors_of(padded(*reference.integer_weights(weight), matrix.form.tiles * 4), values)
    assert ((errors - expected).abs() <= 1e-5 * peaks).all()


def padded(codes: Tensor, scales: Tensor, spans: int) -> IntegerRows:
    missing = spans - len(codes)
    return IntegerRows(F.pad(codes, (0, 0, 0, 0, 0, missing)), F.pad(scales, (0, 0, 0, missing)))


@pytest.mark.parametrize("name", ["Q4_0", "Q5_0", "IQ4_NL", "MXFP4", "int4 g32 zeros", "int4 g128", "int2 channel"])
def test_codes_without_minimums_are_kept(name: str, device: torch.device) -> None:
    matrix, values = matrix_of(name, 24, 256, device)
    errors, peaks = errors_of(integer_weights(matrix), values)
    assert (errors <= 1e-6 * peaks).all()


@pytest.mark.parametrize(("name", "most"), [("Q4_1", 0.7), ("Q4_K", 0.7), ("Q5_K", 0.9)])
def test_minimums_are_more_exact_than_rounding(name: str, most: float, device: torch.device) -> None:
    weight = random_weight(name, 64, 1024, np.random.default_rng(3))
    matrix, values = to_device(weight, device), dequantize(weight)
    assert isinstance(matrix, PackedMatrix)
    found = (values_of(integer_weights(matrix)) - values).square().mean().sqrt()
    rounded = (values_of(IntegerRows(*reference.integer_inputs(values))) - values).square().mean().sqrt()
    assert found <= most * rounded


@pytest.mark.parametrize("gate", Gate)
def test_gated_values_are_rounded_as_inputs(gate: Gate, device: torch.device) -> None:
    gate_up = torch.randn(37, 2 * 200).bfloat16().to(device)
    found = integer_gated(gate_up, gate.value)
    assert found.spans * SPAN == 256
    check_rounding(found, gated(gate_up.float(), gate).cpu())


@pytest.mark.parametrize(("tokens", "columns"), [(1, 32), (33, 128), (7, 200), (70, 512)])
def test_inputs_are_rounded_by_half_a_code_at_most(tokens: int, columns: int, device: torch.device) -> None:
    x = (torch.randn(tokens, columns) * torch.logspace(-4, 4, columns)).bfloat16()
    x[0, :32] = 0
    found = integer_inputs(x.to(device))
    check_rounding(found, x.float())
    codes, scales = reference.integer_inputs(x.float())
    assert ((found.codes[: len(codes)].cpu().int() - codes.int()).abs() <= 1).all()
    assert torch.allclose(found.scales[: len(codes)].cpu(), scales, rtol=1e-6, atol=0)
    assert not found.codes[len(codes) :].any()


def test_nan_and_infinity_in_inputs_give_nan(device: torch.device) -> None:
    matrix, _ = matrix_of("Q4_K", 24, 256, device)
    x = torch.randn(4, 256).bfloat16()
    x[1, 40], x[2, 3] = torch.nan, torch.inf
    out = torch.full((4, 24), 7.0, device=device)
    integer_product(integer_weights(matrix), integer_inputs(x.to(device)), out, bias=None, add=False)
    assert out.isnan().all(1).tolist() == [False, True, True, False]
    assert not out[[0, 3]].isnan().any()


@pytest.mark.parametrize(("tokens", "rows", "columns"), [(1, 16, 256), (130, 40, 400), (40, 136, 512), (150, 130, 128)])
def test_product_is_that_of_the_rounded_rows(tokens: int, rows: int, columns: int, device: torch.device) -> None:
    matrix, values = matrix_of("int4 g32 zeros" if columns % 32 == 0 else "int8 channel", rows, columns, device)
    x, bias, stream = torch.randn(tokens, columns).bfloat16(), torch.randn(rows), torch.randn(tokens, rows)
    weights, inputs = integer_weights(matrix), integer_inputs(x.to(device))
    exact = values_of(inputs) @ values_of(weights).T
    size = values_of(inputs).abs() @ values_of(weights).abs().T
    wide = torch.full((tokens, rows + 3), torch.nan)
    wide[:, 1 : rows + 1] = stream
    out = wide.to(device)
    integer_product(weights, inputs, out[:, 1 : rows + 1], bias=bias.to(device), add=True)
    assert ((out[:, 1 : rows + 1].cpu() - stream - bias - exact).abs() <= 1e-5 * size + 1e-5).all()
    assert out[:, 0].isnan().all()
    assert out[:, rows + 1 :].isnan().all()
    plain = torch.full((tokens, rows), torch.nan, dtype=torch.bfloat16, device=device)
    integer_product(weights, inputs, plain, bias=None, add=False)
    assert ((plain.float().cpu() - exact).abs() <= 0.01 * exact.abs() + 1e-5 * size).all()
    expected_size = (x.double().square() @ values.double().square().T).sqrt()
    assert ((exact - x.double() @ values.double().T).abs() <= 0.05 * expected_size).all()
