"""Products of slots and their packed experts in 8-bit integers, compared with plain torch in float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from quant.cuda.experts import stacked
from quant.cuda.loading import to_device
from quant.cuda.matrix import PackedForm, PackedMatrix
from quant.kernels.integer_experts import SLOTS, integer_expert_product, span_sums
from quant.kernels.integer_rows import IntegerRows, integer_inputs
from quant.kernels.reference import SPAN, dequantize, expert_product
from quant.kernels.token_tiles import NO_EXPERT, TokenTiles, token_tiles
from quant.kernels.unpack import unpack
from quant.tensor import GroupedTensor
from tests.quant.cpu.random_group_weights import GROUP_TYPES, Coded
from tests.quant.cpu.random_weights import QUANTIZED, random_weight, width
from tests.quant.kernels.test_integer_product import values_of
from tests.quant.kernels.test_token_tiles import random_ids

pytestmark = pytest.mark.usefixtures("fenced_memory")

CODED = [
    *QUANTIZED,
    *(name for name, kind in GROUP_TYPES.items() if isinstance(kind, Coded) and not kind.nested),
]
EXPERTS = 3
# largest error of an integer if groups have 16 columns: half an integer, and that of the factors of codes
MOST_ERROR = 0.57


def experts_of(name: str, rows: int, columns: int, device: torch.device) -> tuple[PackedMatrix, Tensor]:
    """Return experts, and their values with the numbers of `PackedForm.integer_table`, float64."""
    rng = np.random.default_rng()
    weights = [random_weight(name, rows, columns, rng) for _ in range(EXPERTS)]
    (matrix,) = stacked(([to_device(it, device)] for it in weights), EXPERTS)
    assert isinstance(matrix, PackedMatrix)
    integers, unit = matrix.form.integer_table
    rounded = [
        replace(it, table=tuple(number * unit for number in integers))
        if isinstance(it, GroupedTensor) and it.table is not None
        else it
        for it in weights
    ]
    return matrix, torch.stack([dequantize(it) for it in rounded]).double()


def product(matrix: PackedMatrix, x: IntegerRows, ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the product of each slot, written to a range of columns of a tensor of NaN."""
    rows = matrix.shape[0] // EXPERTS
    out = torch.full((ids.numel(), rows + 3), torch.nan, dtype=dtype, device=x.codes.device)
    integer_expert_product(matrix, x, out[:, 1 : rows + 1], token_tiles(ids.to(out.device), EXPERTS, SLOTS))
    assert out[:, 0].isnan().all()
    assert out[:, rows + 1 :].isnan().all()
    return out[:, 1 : rows + 1].cpu()


def multiplied_values(matrix: PackedMatrix, device: torch.device) -> Tensor:
    """Return the values by which a product multiplies, float64 [experts, rows, columns]: it multiplies unit vectors."""
    columns, spans = matrix.shape[1], 4 * matrix.form.tiles
    codes = F.pad(torch.eye(columns, dtype=torch.int8), (0, spans * SPAN - columns))
    codes = codes.reshape(columns, spans, SPAN).transpose(0, 1).contiguous().to(device)
    units = IntegerRows(codes, torch.ones(spans, columns, device=device))
    ids = torch.arange(EXPERTS, dtype=torch.int32).repeat(columns, 1)
    return product(matrix, units, ids).double().reshape(columns, EXPERTS, -1).permute(1, 2, 0)


def peaks_of(matrix: PackedMatrix) -> Tensor:
    """Return the largest magnitude that the codes of each span can have, for all of its columns, float64."""
    found = []
    for word in (0, -1):
        filled = matrix.with_rows(matrix.shape[0], torch.clone)
        for plane in (filled.low, filled.high):
            if plane is not None:
                plane.fill_(word)
        found.append(unpack(filled, out_dtype=torch.float32).cpu().abs())
    peaks = torch.maximum(*found)
    spans = F.pad(peaks, (0, -peaks.shape[1] % SPAN)).reshape(len(peaks), -1, SPAN)
    return spans.amax(2).repeat_interleave(SPAN, 1)[:, : matrix.shape[1]].reshape(EXPERTS, -1, matrix.shape[1]).double()


@pytest.mark.parametrize("name", CODED)
def test_weights_of_every_type_are_exact_or_rounded_in_groups_of_16(name: str, device: torch.device) -> None:
    matrix, values = experts_of(name, 24, width(name, 160), device)
    error = (multiplied_values(matrix, device) - values).abs()
    if matrix.form.unit > 16:
        assert (error <= 2e-6 * values.abs().amax()).all()
    else:
        assert (error <= MOST_ERROR * peaks_of(matrix) / 127 + 1e-12).all()


def test_tables_of_whole_numbers_are_exact() -> None:
    assert PackedForm(32, 32, (4,), table=(0, 1, -12)).integer_table == ((0, 1, -12), 1.0)
    assert PackedForm(32, 32, (4,), table=(0.0, 1.0, -0.5)).integer_table == ((0, 127, -64), 1 / 127)


@pytest.mark.share(4)
@pytest.mark.parametrize("per_slot", [False, True])
@pytest.mark.parametrize(
    ("name", "rows", "columns", "tokens", "active"),
    [("Q4_K", 24, 256, 70, 2), ("Q6_K", 136, 512, 3, 3), ("int8 channel", 16, 200, 40, 1), ("MXFP4", 40, 160, 90, 2)],
)
def test_product_is_that_of_the_rounded_rows(
    name: str, rows: int, columns: int, tokens: int, active: int, per_slot: bool, device: torch.device
) -> None:
    matrix, _ = experts_of(name, rows, columns, device)
    ids, x = random_ids(tokens, active, EXPERTS), torch.randn(tokens * (active if per_slot else 1), columns).bfloat16()
    inputs, values = integer_inputs(x.to(device)), multiplied_values(matrix, device)
    rounded = values_of(inputs)[:, :columns]
    exact, bound = expert_product(rounded, values, ids.long()), expert_product(rounded.abs(), values.abs(), ids.long())
    assert ((product(matrix, inputs, ids) - exact).abs() <= 1e-5 * bound + 1e-5).all()
    short = product(matrix, inputs, ids, torch.bfloat16).double()
    assert ((short - exact).abs() <= 0.01 * exact.abs() + 1e-5 * bound).all()


def test_tiles_without_an_expert_are_left_out(device: torch.device) -> None:
    matrix, values = experts_of("int4 g128 zeros", 16, 128, device)
    slots = torch.full((2, SLOTS), 5)
    slots[0, :3], slots[1, 0] = torch.tensor([0, 4, 1]), 3
    ids = torch.full((5,), 2, dtype=torch.int32)
    experts = torch.tensor([2, NO_EXPERT], dtype=torch.int32, device=device)
    tiles = TokenTiles(experts, slots.int().flatten().to(device), SLOTS, 5, 1, ids.to(device))
    x = integer_inputs(torch.randn(5, 128).bfloat16().to(device))
    out = torch.full((5, 16), 7.0, device=device)
    integer_expert_product(matrix, x, out, tiles)
    assert (out.cpu() == 7).all(1).tolist() == [False, False, True, True, False]
    want = expert_product(values_of(x), values, ids[:, None].long())
    kept = torch.tensor([0, 1, 4])
    torch.testing.assert_close(out.cpu().double()[kept], want[kept], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["Q4_K", "Q4_0", "Q6_K"])
def test_nan_and_infinity_in_inputs_give_nan(name: str, device: torch.device) -> None:
    matrix, _ = experts_of(name, 24, 256, device)
    x = torch.randn(4, 256).bfloat16()
    x[1, 40], x[2, 3] = torch.nan, torch.inf
    got = product(matrix, integer_inputs(x.to(device)), torch.tensor([[0], [0], [1], [1]], dtype=torch.int32))
    assert got.isnan().all(1).tolist() == [False, True, True, False]
    assert not got[[0, 3]].isnan().any()


@pytest.mark.parametrize(("tokens", "columns"), [(1, 32), (37, 200)])
def test_sums_of_spans_are_those_of_their_values(tokens: int, columns: int, device: torch.device) -> None:
    x = integer_inputs(torch.randn(tokens, columns).bfloat16().to(device))
    want = values_of(x).reshape(tokens, -1, SPAN).sum(2).T
    torch.testing.assert_close(span_sums(x).cpu().double(), want, rtol=1e-5, atol=1e-5)
