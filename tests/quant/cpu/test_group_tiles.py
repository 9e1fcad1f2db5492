"""Tiles of group formats. Packing keeps all values and needs no extra memory. Errors name unknown formats."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from quant.bitsandbytes import NF4
from quant.cpu.ggml_formats import GROUP, PAIR
from quant.cpu.group_formats import GROUP_FORMATS, GroupTensor, group_format_of, groups_per_scale_of
from quant.cpu.group_tiles import pack, shared_bytes, unpack
from quant.errors import UnsupportedQuantization
from quant.kernels.reference import dequantize
from quant.tensor import Float8Tensor, GroupedTensor, NestedScale
from tests.quant.checkpoint_layers import (
    Layer,
    awq_layer,
    decoded,
    eight_bit_layer,
    four_bit_layer,
    gptq_layer,
    pack_quantized_layer,
)
from tests.quant.cpu.random_group_weights import GROUP_TYPES, Coded, Float8, Kind
from tests.quant.cpu.random_weights import bits

SEED = 6
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


def tiles_bytes(weight: GroupTensor) -> int:
    """Return the tiles of a weight as bytes, for an even number of tiles."""
    rows, columns = weight.shape
    return 2 * -(-rows // PAIR) * group_format_of(weight).tile_bytes(columns // GROUP, groups_per_scale_of(weight))


def packed(weight: GroupTensor) -> Bytes:
    """Pack into memory that is not zero, so that a byte that is not written is noticed."""
    size = tiles_bytes(weight)
    memory = np.full(size + shared_bytes(weight), 0xA5, np.uint8)
    memory[size:] = 0
    pack(weight, memory[:size], memory[size:])
    return memory


def test_group_types_cover_every_layout() -> None:
    rng = np.random.default_rng(SEED)
    assert {group_format_of(kind.make(2, 128, rng)) for kind in GROUP_TYPES.values()} == set(GROUP_FORMATS)
    assert len({layout.part for layout in GROUP_FORMATS}) == len(GROUP_FORMATS)


@pytest.mark.parametrize("name", GROUP_TYPES)
@pytest.mark.parametrize("shape", [(1, 32), (15, 64), (16, 96), (17, 160), (31, 288), (32, 32), (33, 64), (100, 416)])
def test_unpack_restores_every_value(name: str, shape: tuple[int, int]) -> None:
    weight = GROUP_TYPES[name].make(*shape, np.random.default_rng(SEED))
    again = unpack(packed(weight), group_format_of(weight), shape)
    assert again.shape == shape
    assert torch.equal(bits(dequantize(again)), bits(dequantize(weight)))


@pytest.mark.parametrize("name", GROUP_TYPES)
def test_pack_writes_every_byte_of_a_tile(name: str) -> None:
    weight = GROUP_TYPES[name].make(40, 224, np.random.default_rng(SEED))
    clean = np.zeros(tiles_bytes(weight) + shared_bytes(weight), np.uint8)
    pack(weight, clean[: tiles_bytes(weight)], clean[tiles_bytes(weight) :])
    assert np.array_equal(packed(weight), clean)


@pytest.fixture(scope="module")
def layers() -> dict[str, Layer]:
    """Layers in the formats of checkpoints. `stored` is their size in the file."""
    rng, shape = np.random.default_rng(SEED), (32, 1024)
    made = {f"gptq {bits} g{group}": gptq_layer(rng, *shape, group, bits) for bits in (2, 4, 8) for group in (32, 128)}
    made |= {f"awq g{group}": awq_layer(rng, *shape, group) for group in (32, 64, 128)}
    made |= {f"bitsandbytes {table}": four_bit_layer(rng, *shape, 64, table) for table in ("nf4", "fp4")}
    made |= {
        f"compressed-tensors g{group}, {symmetric}": pack_quantized_layer(rng, *shape, group, symmetric=symmetric)
        for group in (32, 64, 128, None)
        for symmetric in (True, False)
    }
    return made | {"gptq channel": gptq_layer(rng, *shape, None), "LLM.int8": eight_bit_layer(rng, *shape)}


def test_tiles_are_no_larger_than_the_file(layers: dict[str, Layer]) -> None:
    for name, layer in layers.items():
        weight = decoded(layer)
        assert torch.equal(
            dequantize(unpack(packed(weight), group_format_of(weight), weight.shape)), dequantize(weight)
        )
        assert len(packed(weight)) <= 1.03 * layer.stored, name


@pytest.mark.parametrize("name", GROUP_TYPES)
@pytest.mark.parametrize("shape", [(64, 576), (576, 1536), (32, 4096)])
def test_tiles_are_no_larger_than_the_canonical_form(name: str, shape: tuple[int, int]) -> None:
    weight = GROUP_TYPES[name].make(*shape, np.random.default_rng(SEED))
    assert len(packed(weight)) <= 1.03 * weight.nbytes


def make(kind: Kind) -> GroupTensor:
    return kind.make(48, 192, np.random.default_rng(SEED))


def odd_nested() -> GroupedTensor:
    weight = Coded(table=NF4, nested=True).make(48, 192, np.random.default_rng(SEED))
    assert isinstance(weight.scale, NestedScale)
    return replace(weight, scale=replace(weight.scale, block_size=24, block_scales=torch.ones(4)))


@pytest.mark.parametrize(
    ("weight", "what"),
    [
        (make(Coded(group=16)), "CODED weights in groups of 16 columns"),
        (make(Coded(group=48)), "CODED weights in groups of 48 columns"),
        (make(Float8(block=(16, 48))), "FLOAT8 weights in groups of 48 columns"),
        (make(Float8(block=(24, 64))), "FLOAT8 weights of this kind"),
        (replace(Coded().make(48, 192, np.random.default_rng(SEED)), zero=7), "CODED weights of this kind"),
        (make(Coded(table=(*NF4[1:], 2.0))), "CODED weights of this kind"),
        (odd_nested(), "CODED weights with nested scales in blocks of 24"),
    ],
)
def test_weights_without_a_layout_are_rejected_by_type_name(weight: GroupTensor, what: str) -> None:
    with pytest.raises(UnsupportedQuantization, match=what):
        tiles_bytes(weight)


def test_nan_in_float8_weights_is_rejected() -> None:
    weight = make(Float8())
    assert isinstance(weight, Float8Tensor)
    for code in (0x7F, 0xFF):
        values = weight.values.view(torch.uint8).clone()
        values[47, 191] = code
        with pytest.raises(UnsupportedQuantization, match="NaN elements"):
            packed(replace(weight, values=values.view(torch.float8_e4m3fn)))
