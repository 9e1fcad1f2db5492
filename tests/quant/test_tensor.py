from dataclasses import replace

import numpy as np
import pytest
import torch

from quant.ggml_blocks import integers
from quant.tensor import CodedTensor, GroupedTensor, GroupScale, NestedScale, Scale
from tests.quant.checkpoint_layers import decoded, four_bit_layer, gptq_layer

RNG = np.random.default_rng(6)
WEIGHT = decoded(gptq_layer(RNG, 16, 96, 32, ordered=True))
NESTED = decoded(four_bit_layer(RNG, 6, 64, 16, nested=True))


def nested(block_size: int) -> NestedScale:
    assert isinstance(NESTED.scale, NestedScale)
    return replace(NESTED.scale, block_size=block_size)


@pytest.mark.parametrize(
    ("weight", "change"),
    [
        (WEIGHT, {"shape": (16, 88)}),
        (WEIGHT, {"shape": (16, 104)}),
        (WEIGHT, {"shape": (15, 96)}),
        (WEIGHT, {"group": 16}),
        (WEIGHT, {"scale": GroupScale(torch.ones(16, 4))}),
        (WEIGHT, {"zero": WEIGHT.codes}),
        (WEIGHT, {"order": torch.arange(95)}),
        (WEIGHT, {"table": (0.0,) * 16}),
        (NESTED, {"table": (0.0,) * 8}),
        (NESTED, {"scale": nested(block_size=1)}),
    ],
)
def test_inconsistent_fields_raise_value_error(weight: GroupedTensor, change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        replace(weight, **change)  # type: ignore[arg-type]


def test_nbytes_counts_every_part() -> None:
    assert isinstance(WEIGHT.scale, GroupScale)
    assert WEIGHT.nbytes == 16 * 96 // 2 + 16 * 3 * WEIGHT.scale.stored.itemsize + 16 * 4 + 4 * 96
    assert NESTED.nbytes == 6 * 64 // 2 + 6 * 4 + 256 * 4 + 4


HALVES = Scale(torch.tensor([[0.5, 2.0**-24], [3.0, 0.0]]).half(), unit=0.125)
SUB_SCALES = integers(np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.uint8), (8,))
WITH_SUB_SCALES = replace(HALVES, sub_scales=SUB_SCALES, sub_scale_zero=2)


def test_unit_multiplies_scales_without_rounding() -> None:
    assert HALVES.values().tolist() == [[0.0625, 2.0**-27], [0.375, 0.0]]
    assert WITH_SUB_SCALES.values().tolist() == [[-0.0625, 0.0, 2.0**-27, 2.0**-26], [1.125, 1.5, 0.0, 0.0]]
    assert Scale(torch.tensor([[127]], dtype=torch.uint8), unit=4.0).values().tolist() == [[2.0]]


@pytest.mark.parametrize("scale", [HALVES, WITH_SUB_SCALES])
def test_selected_rows_and_block_factors_keep_the_unit(scale: Scale) -> None:
    assert torch.equal(scale.rows(torch.tensor([1])).values(), scale.values()[1:])
    assert torch.equal(scale.block_factors(), HALVES.values())


def test_minimum_must_not_have_a_unit() -> None:
    codes, whole = integers(np.zeros((2, 64), np.uint8), (4,)), Scale(torch.ones(2, 2).half())
    weight = CodedTensor((2, 64), "odd", 32, codes, replace(whole, unit=0.5), minimum=whole)
    with pytest.raises(ValueError, match="do not fit"):
        replace(weight, minimum=weight.scale)
