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
from quant.kernels.integer_product import integer_product
from quant.kernels.integer_rows import SPAN, IntegerRows, integer_gated, integer_inputs, integer_weights
from quant.kernels.reference import dequantize
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


def check_rounding(rows: IntegerRows, values: Tensor) -> None:
    spans = F.pad(values, (0, rows.spans * SPAN - values.shape[1])).reshape(len(values), -1, SPAN)
    peaks = spans.abs().amax(2, keepdim=True)
    errors = (values_of(rows).reshape(spans.shape) - spans).abs()
    assert (errors <= HALF_A_CODE * peaks / 127 + 1e-12).all()
    largest = rows.codes.cpu().int().abs().amax(2).T
    assert ((largest == 127) | (peaks[:, :, 0] == 0)).all()


@pytest.mark.parametrize("name", CODED)
def test_weights_of_every_type_are_rounded_by_half_a_code_at_most(name: str, device: torch.device) -> None:
    matrix, values = matrix_of(name, 40, width(name, 160), device)
    check_rounding(integer_weights(matrix), values)


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
    check_rounding(integer_inputs(x.to(device)), x.float())


def test_inputs_that_are_not_numbers_make_results_that_are_none(device: torch.device) -> None:
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
    want = x.float() @ values.T
    assert (exact - want).square().mean().sqrt() <= 0.015 * want.square().mean().sqrt()
