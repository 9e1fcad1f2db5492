from dataclasses import replace

import numpy as np
import pytest
import torch

from quant.tensor import GroupedTensor, GroupScale, NestedScale
from tests.quant.checkpoint_layers import decoded, four_bit_layer, gptq_layer

RNG = np.random.default_rng(6)
WEIGHT = decoded(gptq_layer(RNG, 16, 96, 32, ordered=True))
NESTED = decoded(four_bit_layer(RNG, 6, 64, 16, nested=True))


def nested(span: int) -> NestedScale:
    assert isinstance(NESTED.scale, NestedScale)
    return replace(NESTED.scale, span=span)


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
        (NESTED, {"scale": nested(span=1)}),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(weight: GroupedTensor, change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        replace(weight, **change)  # type: ignore[arg-type]


def test_counts_every_byte() -> None:
    assert WEIGHT.nbytes == 16 * 96 // 2 + 16 * 3 * WEIGHT.scale.whole.itemsize + 16 * 4 + 4 * 96
    assert NESTED.nbytes == 6 * 64 // 2 + 6 * 4 + 256 * 4 + 4
