"""Layers over packed tiles: embedding rows, fused segments, and rejected shapes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from quant.cpu.activations import Form
from quant.cpu.arena import Arena
from quant.cpu.ggml_formats import PAIR
from quant.cpu.linear import CpuBackend, CpuLinear
from quant.errors import UnsupportedQuantization
from quant.kernels.reference import dequantize, dequantize_rows
from quant.tensor import QTensor
from tests.quant.cpu.random_group_weights import ORDERED
from tests.quant.cpu.random_weights import (
    EVERY,
    FLOAT_GROUP_TYPES,
    PLAIN,
    TYPES,
    any_weight,
    bits,
    random_weight,
    width,
)

SEED = 5

pytestmark = pytest.mark.usefixtures("every_layout")


def layer(*segments: QTensor, form: Form = Form.BITS_14) -> CpuLinear:
    return CpuBackend(Arena(), form).linear(segments)


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    """Return whether both are equal bit for bit, including the sign of zero. Any NaN equals any other."""
    return bool(((bits(ours) == bits(theirs)) | (ours.isnan() & theirs.isnan())).all())


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("shape", [(1, 32), (17, 96), (50, 160)])
def test_embedding_rows_equal_the_dequantized_weight(name: str, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(SEED)
    ids = torch.from_numpy(rng.integers(0, shape[0], 40))
    rows, columns = shape[0], width(name, shape[1])
    weights = [random_weight(name, rows, columns, rng)]
    for weight in [*weights, any_weight(name, rows, columns, rng)] if name in TYPES else weights:
        assert same_bits(layer(weight).rows(ids), dequantize_rows(weight, ids))


@pytest.mark.parametrize("name", ORDERED)
def test_ordered_columns_multiply_reordered_inputs(name: str) -> None:
    rng = np.random.default_rng(SEED)
    weight = ORDERED[name].make(50, 160, rng)
    x, ids = torch.from_numpy(rng.standard_normal((5, 160), np.float32)), torch.tensor([49, 0, 7])
    made, straight = layer(weight), layer(replace(weight, order=None))
    assert weight.order is not None
    assert torch.equal(bits(made.forward(x)), bits(straight.forward(x[:, weight.order])))
    assert torch.equal(bits(made.rows(ids)), bits(dequantize_rows(weight, ids)))


def test_segments_of_equal_order_are_joined_and_orders_are_shared() -> None:
    rng = np.random.default_rng(SEED)
    names = ("int4 g32 zeros 1", "int4 g32 zeros 1", "int4 g32 zeros 2", "int8 channel 1", "int4 g32 zeros")
    made = layer(*(random_weight(name, PAIR, 64, rng) for name in names))
    assert [part.rows for part in made.parts] == [2 * PAIR, PAIR, PAIR, PAIR]
    first, second, third, last = (part.order for part in made.parts)
    assert first is third
    assert first is not second
    assert second is not None
    assert last is None


@pytest.mark.parametrize("row", [-1, 20, 1 << 40])
def test_row_out_of_range_raises_index_error(row: int) -> None:
    table = layer(random_weight("Q8_0", 20, 32, np.random.default_rng(SEED)))
    with pytest.raises(IndexError, match=f"row {row} is not within the 20 rows"):
        table.rows(torch.tensor([3, row]))


MIXES = [
    [("Q4_K", 64), ("Q4_K", 32), ("Q6_K", 32)],
    [("Q5_0", 40), ("Q4_K", 64), ("Q6_K", 8), ("IQ4_XS", 33), ("Q8_0", 31), ("F16", 2)],
    [("Q2_K", 32), ("Q3_K", 32), ("MXFP4", 64), ("TQ2_0", 16), ("TQ1_0", 16)],
    [("Q4_1", 64), ("Q8_0", 32)],
    [("F16", 32), ("Q4_0", 64)],
    [("Q4_0", 33), ("Q4_0", 7), ("Q4_0", 64)],
    [("Q4_1", 17), ("Q8_0", 40), ("Q4_1", 1)],
    [("F32", 5), ("BF16", 100), ("F16", 3), ("F16", 32)],
    [("Q4_0", 32), ("Q4_0", 96), ("Q4_1", 32), ("Q4_0", 16), ("Q4_0", 16)],
    [("int4 g64 zeros", 64), ("int4 g32 zeros", 32), ("int8 channel", 40), ("int4 g64 zeros", 7)],
    [("e4m3 tensor", 64), ("e4m3 tensor", 32), ("e4m3 channel", 33), ("Q4_0", 32), ("F16", 5)],
    [("nf4 g64 nested", 64), ("nf4 g64 nested", 96), ("nf4 g64 nested", 17), ("int4 g128", 32), ("fp4 g64", 1)],
    [("int4 g32 zeros 1", 32), ("int4 g32 zeros 1", 64), ("int4 g32 zeros 2", 32), ("int4 g32 zeros", 32)],
    [("Q4_0", 17), ("nf4 g64 2", 40), ("int8 channel 1", 7), ("F16", 32), ("int4 g32 zeros 1", 1)],
    [("int2 g32 zeros", 32), ("int4 g96 zeros", 32), ("int4 g96 zeros", 32), ("e5m2 channel", 31)],
]


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("tokens", [1, 2, 3, 5])
@pytest.mark.parametrize("form", [Form.BITS_8, Form.BITS_14])
def test_fused_layer_equals_separate_segments(mix: list[tuple[str, int]], tokens: int, form: Form) -> None:
    rng = np.random.default_rng(SEED)
    columns = max(width(name, 96) for name, _ in mix)
    segments = [random_weight(name, rows, columns, rng) for name, rows in mix]
    x = torch.from_numpy(rng.standard_normal((tokens, columns), np.float32))
    fused = layer(*segments, form=form)
    apart = torch.cat([layer(segment, form=form).forward(x) for segment in segments], dim=1)
    assert torch.equal(bits(fused.forward(x)), bits(apart))
    assert (fused.inputs, fused.outputs) == (columns, apart.shape[1])
    assert torch.equal(bits(fused.dequantize()), bits(torch.cat([dequantize(segment) for segment in segments])))


def test_segments_are_joined_only_at_pairs_of_tiles() -> None:
    rng = np.random.default_rng(SEED)
    whole = layer(*(random_weight("Q4_0", rows, 32, rng) for rows in (PAIR, 3 * PAIR, 5)))
    assert [(part.first, part.rows) for part in whole.parts] == [(0, 4 * PAIR + 5)]
    cut = layer(*(random_weight("Q4_0", rows, 32, rng) for rows in (PAIR, 5, PAIR)))
    assert [(part.first, part.rows) for part in cut.parts] == [(0, PAIR + 5), (PAIR + 5, PAIR)]
    assert [cut.part_of(row).first for row in (0, PAIR + 4, PAIR + 5, 2 * PAIR + 4)] == [0, 0, PAIR + 5, PAIR + 5]


def test_address_of_a_segment_must_be_at_a_pair_of_tiles() -> None:
    rng = np.random.default_rng(SEED)
    (part,) = layer(*(random_weight("Q4_1", PAIR, 64, rng) for _ in range(3))).parts
    assert part.address(PAIR) - part.address(0) == 2 * part.tile_bytes == 2 * 2 * 320
    with pytest.raises(UnsupportedQuantization, match="40 rows"):
        part.address(40)


@pytest.mark.parametrize("columns", [16, 33, 80])
def test_columns_must_be_a_multiple_of_the_group(columns: int) -> None:
    with pytest.raises(UnsupportedQuantization, match=f"{columns} columns"):
        layer(random_weight("F32", 16, columns, np.random.default_rng(SEED)))


def test_weight_type_determines_the_form_of_activations() -> None:
    rng = np.random.default_rng(SEED)
    for form in (Form.BITS_8, Form.BITS_14):
        for name in EVERY:
            made = CpuBackend(Arena(), form).linear([random_weight(name, 8, width(name, 32), rng)])
            coarse = Form.SUPER_BLOCKS if width(name, 32) == 256 else Form.BITS_8
            quantized = coarse if form is Form.BITS_8 else form
            assert made.form(made.parts[0]) is (Form.FLOAT if name in (*PLAIN, *FLOAT_GROUP_TYPES) else quantized)


def test_all_weights_are_in_one_arena(every_layout: Path) -> None:
    arena = Arena()
    backend = CpuBackend(arena)
    rng = np.random.default_rng(SEED)
    layers = [backend.linear([random_weight(name, 40, 256, rng)]) for name in EVERY]
    ranges = arena.address_ranges()
    for part in (part for made in layers for part in made.parts):
        assert ranges.contains(part.region.address, part.region.size)
    for made in layers:
        made.forward(torch.ones(3, 256))
    arena.check_guards()
