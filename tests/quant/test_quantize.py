import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quant.bitsandbytes import NF4
from quant.errors import ModelFileError, UnsupportedQuantization
from quant.ggml_blocks import SLAB
from quant.kernels.reference import dequantize
from quant.quantize import Quantizer, dynamic_table, fp8, group_size, int4, is_linear_weight, nf4
from quant.tensor import GroupedTensor, Integers, NestedScale, PlainTensor
from tests.quant.canonical_bits import same

QUANTIZERS: dict[str, Quantizer] = {"fp8": fp8, "int4": int4, "nf4": nf4}
TYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
ROWS = st.integers(1, 9)
SEEDS = st.integers(0, 1 << 31)


def random(seed: int, rows: int, columns: int, dtype: torch.dtype = torch.float32) -> PlainTensor:
    """Return rows of very different magnitudes; the first is zero."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator) * torch.logspace(-3, 0.5, rows).unsqueeze(-1)
    values[0] = 0
    return PlainTensor((rows, columns), "F32", values[torch.randperm(rows, generator=generator)].to(dtype))


def nearest(values: Tensor, choices: Tensor) -> Tensor:
    """Return the distance of each value from the nearest of its choices, which are [..., n]; float64."""
    return (values.double().unsqueeze(-1) - choices.double()).abs().amin(-1)


def spread(weight: GroupedTensor) -> tuple[Tensor, Tensor]:
    """Return the scale and zero point of every element."""
    assert isinstance(weight.zero, Integers)
    zeros = weight.zero.values()[:, : weight.groups]
    return tuple(part.repeat_interleave(weight.group, 1) for part in (weight.scale.values(), zeros.float()))  # type: ignore[return-value]


@given(SEEDS, ROWS, st.integers(1, 70), TYPES)
def test_fp8_chooses_the_nearest_number(seed: int, rows: int, columns: int, dtype: torch.dtype) -> None:
    plain = random(seed, rows, columns, dtype)
    weight = fp8(plain)
    bytes_ = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = bytes_[bytes_.isfinite()]
    error = (plain.values.double() - dequantize(weight).double()).abs()
    best = nearest(plain.values, weight.scale.float().unsqueeze(-1) * numbers)
    torch.testing.assert_close(error, best, rtol=1e-5, atol=1e-9)
    largest = plain.values.abs().amax(1, keepdim=True).float()
    torch.testing.assert_close(weight.scale.float() * 448, largest, rtol=0.004, atol=1e-30)


@given(SEEDS, ROWS, st.integers(1, 5), st.sampled_from([32, 64, 128, 24]), TYPES)
def test_int4_chooses_the_nearest_code(seed: int, rows: int, groups: int, group: int, dtype: torch.dtype) -> None:
    plain = random(seed, rows, groups * group, dtype)
    weight = int4(plain, group)
    scales, zeros = spread(weight)
    choices = scales.unsqueeze(-1) * (torch.arange(16) - zeros.unsqueeze(-1))
    error = (plain.values.double() - dequantize(weight).double()).abs()
    torch.testing.assert_close(error, nearest(plain.values, choices), rtol=1e-5, atol=1e-9)


def plain_rounding(values: Tensor, group: int) -> Tensor:
    """Round to 16 levels with equal steps from the smallest to the largest value of each group."""
    groups = values.reshape(-1, group)
    low, high = groups.amin(1, keepdim=True).clamp(max=0), groups.amax(1, keepdim=True).clamp(min=0)
    scale = (high - low) / 15
    zero = (-low / scale).round()
    return (((groups / scale).round() + zero).clamp(0, 15) - zero).mul(scale).view(values.shape)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_int4_error_is_below_plain_rounding(group: int) -> None:
    normal = torch.randn(64, 512)
    for values in (normal, normal.abs() + 1, normal**3, torch.rand(64, 512) - 0.2):
        error = (dequantize(int4(PlainTensor((64, 512), "F32", values), group)) - values).square().sum()
        plain = (plain_rounding(values, group) - values).square().sum()
        assert error < 0.97 * plain


@given(SEEDS, st.sampled_from([32, 64, 128]))
def test_importance_reduces_the_weighted_error(seed: int, group: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(64, 256, generator=generator)
    importance = torch.rand(256, generator=generator).mul(12).sub(6).exp()  # values from 0.0025 to 400
    plain = PlainTensor((64, 256), "F32", values)
    errors = [
        ((dequantize(int4(plain, group, given)) - values).square() * importance).sum() for given in (importance, None)
    ]
    assert errors[0] < 0.97 * errors[1]


@given(SEEDS, st.floats(1e-30, 1e30))
def test_equal_importance_does_not_change_the_result(seed: int, count: float) -> None:
    plain = random(seed, 5, 128, torch.bfloat16)
    assert same(int4(plain, 32, torch.full((128,), count)), int4(plain, 32))


@given(SEEDS)
def test_single_important_column_has_a_smaller_error(seed: int) -> None:
    plain = PlainTensor((64, 128), "F32", torch.randn(64, 128, generator=torch.Generator().manual_seed(seed)))
    importance = torch.zeros(128)
    importance[5] = 3.0
    found, without = dequantize(int4(plain, 64, importance)), dequantize(int4(plain, 64))
    errors = [(values - plain.values).square().sum(0) for values in (found, without)]
    assert errors[0][5] < 0.5 * errors[1][5]
    assert torch.equal(found[:, 64:], without[:, 64:])  # the importance of these columns is 0


def test_int4_of_representable_values_is_exact() -> None:
    codes, zeros = torch.randint(0, 16, (8, 4, 32)), torch.randint(0, 16, (8, 4, 1))
    codes[..., 0], codes[..., 1] = 0, 15
    scales = torch.rand(8, 4, 1).add(0.1).bfloat16().float()
    values = (scales * (codes - zeros)).view(8, 128)
    assert torch.equal(dequantize(int4(PlainTensor((8, 128), "F32", values), 32)), values)


@given(SEEDS, ROWS, st.integers(1, 5), TYPES)
def test_nf4_equals_its_formula(seed: int, rows: int, blocks: int, dtype: torch.dtype) -> None:
    plain = random(seed, rows, 64 * blocks, dtype)
    weight = nf4(plain)
    by_block = plain.values.float().view(rows, blocks, 64)
    largest = by_block.abs().amax(-1)
    assert torch.equal(weight.scale.values(), largest)
    scaled = by_block * (1 / largest.clamp(min=1e-38)).unsqueeze(-1)
    table = torch.tensor(NF4)
    chosen = table[weight.codes.values()[:, : 64 * blocks].int()].view(rows, blocks, 64)
    torch.testing.assert_close((scaled - chosen).abs().double(), nearest(scaled, table), rtol=0, atol=1e-6)


def test_nf4_rounds_halfway_values_down() -> None:
    table = np.array(NF4, np.float32)
    values = torch.ones(1, 64)
    values[0, :15] = torch.from_numpy((table[:-1] + table[1:]) / 2)
    codes = nf4(PlainTensor((1, 64), "F32", values)).codes.values()
    assert codes[0, :16].tolist() == [*range(15), 15]


@given(SEEDS, st.integers(1, 40), st.integers(1, 12))
def test_nested_scales_choose_the_nearest_number(seed: int, rows: int, blocks: int) -> None:
    plain = random(seed, rows, 64 * blocks)
    exact, weight = nf4(plain).scale.values(), nf4(plain, nested=True)
    scale = weight.scale
    assert isinstance(scale, NestedScale)
    assert scale.offset == pytest.approx(float(exact.mean()))
    numbers = (exact - scale.offset).flatten()
    whole = scale.block_scales.repeat_interleave(256)[: len(numbers)]
    assert torch.equal(torch.stack([part.abs().max() for part in torch.split(numbers, 256)]), scale.block_scales)
    error = (scale.values().flatten() - scale.offset - numbers).abs().double()
    torch.testing.assert_close(error, nearest(numbers, whole.unsqueeze(-1) * scale.table), rtol=1e-3, atol=1e-6)


def test_dynamic_table_has_the_published_numbers() -> None:
    table = dynamic_table()
    assert len(table) == len(set(table.tolist())) == 256
    assert (np.diff(table) > 0).all()
    assert {0.0, 1.0} <= set(table.tolist())
    positive = table[(table > 0) & (table < 1)]
    np.testing.assert_array_equal(positive, -table[table < 0][::-1])
    by_decade = np.histogram(positive, [10.0**e for e in range(-7, 1)])[0]
    assert by_decade.tolist() == [1, 2, 4, 8, 16, 32, 64]
    np.testing.assert_allclose(positive[:3], [0.55e-6, 3.25e-6, 7.75e-6], rtol=1e-6)


@pytest.mark.parametrize("method", QUANTIZERS)
def test_slabs_of_rows_do_not_change_the_result(method: str) -> None:
    rows, columns = 3 * (SLAB // 256) + 5, 256
    plain = random(1, rows, columns, torch.bfloat16)
    whole = dequantize(QUANTIZERS[method](plain))
    parts = [PlainTensor((len(part), columns), "BF16", part) for part in torch.split(plain.values, 300)]
    assert torch.equal(torch.cat([dequantize(QUANTIZERS[method](part)) for part in parts]), whole)


@pytest.mark.parametrize("method", QUANTIZERS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_non_finite_or_large_values_are_rejected(method: str, value: float) -> None:
    plain = random(2, 300, 64)
    plain.values[-1, 3] = value
    with pytest.raises(ModelFileError, match="not finite"):
        QUANTIZERS[method](plain)


@pytest.mark.parametrize("method", QUANTIZERS)
@pytest.mark.parametrize("shape", [(64,), (2, 2, 64), (0, 64), (64, 0)])
def test_tensor_that_is_not_a_matrix_is_rejected(method: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ModelFileError, match="not a matrix"):
        QUANTIZERS[method](PlainTensor(shape, "F32", torch.zeros(shape)))


@pytest.mark.parametrize("method", QUANTIZERS)
def test_extreme_values_stay_finite(method: str) -> None:
    values = torch.full((3, 64), 1e-45)
    values[1], values[2, ::2] = 9e14, -9e14
    result = dequantize(QUANTIZERS[method](PlainTensor((3, 64), "F32", values)))
    assert result.isfinite().all()
    torch.testing.assert_close(result, values, rtol=0.1, atol=1e-30)


def test_group_size_divides_every_matrix() -> None:
    assert group_size([4096, 11008]) == 128
    assert group_size([576, 1536]) == 64
    assert group_size([4096, 96]) == 32
    with pytest.raises(UnsupportedQuantization, match="128, 64, 32"):
        group_size([4096, 48])
    with pytest.raises(UnsupportedQuantization, match=r"Groups of 128 .* 192 columns"):
        int4(random(0, 4, 192), 128)
    with pytest.raises(UnsupportedQuantization, match=r"Groups of 64 .* 96 columns"):
        nf4(random(0, 4, 96))


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (64, 64), True),
        ("model.layers.0.mlp.experts.3.down_proj.weight", (64, 64), True),
        ("model.layers.0.mlp.gate_proj.weight", (64, 64), True),
        ("blk.0.ffn_gate.weight", (64, 64), True),
        ("blk.0.attn_output.weight", (64, 64), True),
        ("model.layers.0.self_attn.q_proj.bias", (64,), False),
        ("model.layers.0.input_layernorm.weight", (64,), False),
        ("model.layers.0.mlp.gate.weight", (64, 64), False),
        ("model.embed_tokens.weight", (64, 64), False),
        ("lm_head.weight", (64, 64), False),
        ("token_embd.weight", (64, 64), False),
        ("output.weight", (64, 64), False),
        ("blk.0.ffn_gate_inp.weight", (64, 64), False),
        ("model.layers.0.router.proj.weight", (64, 64), False),
        ("model.layers.0.per_layer_projection.weight", (64, 64), True),
        ("model.embed_tokens_per_layer.weight", (64, 64), False),
        ("model.layers.0.self_attn.q_proj.weight_scale", (64, 1), False),
        ("conv.weight", (4, 4, 4), False),
        ("weight", (64, 64), False),
    ],
)
def test_linear_weights_are_recognized_by_name_and_shape(name: str, shape: tuple[int, ...], expected: bool) -> None:
    assert is_linear_weight(name, shape) is expected
