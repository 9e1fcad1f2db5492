"""Random weights of every kind and size."""

import pytest
import torch

from quant.ggml_blocks import BLOCKS
from quant.kernels.reference import dequantize
from tests.kernels.weights import DEVIATION, KINDS, ROWS, weight

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.mark.parametrize("kind", ["BF16", "Q4_K", "Q6_K", "MXFP4", "int4 g128 zeros", "nf4 g64 nested", "e4m3 128x128"])
def test_weight_repeats_a_few_rows(kind: str) -> None:
    many, few = (dequantize(weight(kind, rows, 512, CPU)) for rows in (2 * ROWS + 3, ROWS))
    assert torch.equal(many, few.repeat(3, 1)[: len(many)])


@pytest.mark.parametrize("kind", BLOCKS)
def test_random_weights_have_realistic_deviations(kind: str) -> None:
    values = dequantize(weight(kind, ROWS, 512, CPU))
    assert DEVIATION / 2 < float(values.std()) < 2 * DEVIATION
    assert abs(float(values.mean())) < DEVIATION / 2


def test_weights_on_the_meta_device_have_only_shapes() -> None:
    for kind in KINDS:
        assert weight(kind, 49155, 256, META).shape == (49155, 256)
