"""Tiles of GGML formats. Packing is lossless and needs no extra memory. Errors name unknown formats."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from quant.cpu.ggml_formats import GGML_FORMATS, PAIR, ggml_format_of
from quant.cpu.ggml_tiles import pack, packed_bytes, unpack
from quant.errors import UnsupportedQuantization
from quant.ggml_blocks import BLOCKS, PLAIN_TYPES, integers
from quant.kernels.reference import dequantize
from quant.tensor import BlockTensor, CodedTensor, PlainTensor, Scale
from tests.quant.cpu.random_weights import KINDS, QUANTIZED, TYPES, any_weight, bits, random_ggml_weight, width

SEED = 1
SHAPES = [(1, 32), (15, 64), (16, 96), (17, 32), (31, 160), (32, 32), (33, 64), (64, 288), (100, 96)]


def packed(weight: BlockTensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Pack into memory that is not zero, so that a byte that is not written is noticed."""
    out = np.full(packed_bytes(weight), 0xA5, np.uint8)
    pack(weight, out)
    return out


def test_every_ggml_type_has_a_layout() -> None:
    rng = np.random.default_rng(SEED)
    assert set(TYPES) == {*BLOCKS, *PLAIN_TYPES}
    assert {ggml_format_of(random_ggml_weight(name, 1, width(name, 32), rng)) for name in TYPES} == set(GGML_FORMATS)
    assert [layout.number for layout in GGML_FORMATS] == list(range(len(GGML_FORMATS)))


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_unpack_restores_every_bit(name: str, shape: tuple[int, int]) -> None:
    shape = shape[0], width(name, shape[1])
    weight = any_weight(name, *shape, np.random.default_rng(SEED))
    again = unpack(packed(weight), ggml_format_of(weight), shape)
    assert again.shape == shape
    if isinstance(weight, PlainTensor):
        assert isinstance(again, PlainTensor)
        assert again.values.dtype is weight.values.dtype
        assert torch.equal(bits(again.values), bits(weight.values))
        return
    assert isinstance(again, CodedTensor)
    assert (again.group, again.zero, again.table) == (weight.group, weight.zero, weight.table)
    assert torch.equal(again.codes.values(), weight.codes.values())
    same_scale(again.scale, weight.scale)
    assert (again.minimum is None) == (weight.minimum is None)
    if weight.minimum is not None and again.minimum is not None:
        same_scale(again.minimum, weight.minimum)


def same_scale(ours: Scale, theirs: Scale) -> None:
    assert torch.equal(bits(ours.block_scales), bits(theirs.block_scales))
    assert ours.sub_scale_zero == theirs.sub_scale_zero
    assert (ours.sub_scales is None) == (theirs.sub_scales is None)
    if ours.sub_scales is not None and theirs.sub_scales is not None:
        assert torch.equal(ours.sub_scales.values(), theirs.sub_scales.values())


def test_packed_six_bit_codes_need_only_a_mask() -> None:
    """Three of the four chunks of 16 rows by 4 columns are decoded with a mask alone."""
    weight = random_ggml_weight("Q6_K", 32, 256, np.random.default_rng(SEED))
    assert isinstance(weight, CodedTensor)
    first = ggml_format_of(weight).head_bytes
    halves = packed(weight)[first : first + 2 * 3 * 64].reshape(2, 3, 16, 4)
    codes = weight.codes.values().numpy()[:16, :32].reshape(16, 2, 4, 4).transpose(1, 2, 0, 3)
    assert np.array_equal(halves & 0x3F, codes[:, :3])
    assert np.array_equal(halves[:, 0] >> 6 | halves[:, 1] >> 6 << 2 | halves[:, 2] >> 6 << 4, codes[:, 3])


@pytest.mark.parametrize("name", TYPES)
def test_packing_keeps_values(name: str) -> None:
    columns = width(name, 128)
    weight = random_ggml_weight(name, 50, columns, np.random.default_rng(SEED))
    again = unpack(packed(weight), ggml_format_of(weight), (50, columns))
    assert torch.equal(bits(dequantize(again)), bits(dequantize(weight)))


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("rows", [1, 16, 17, 33])
def test_padding_rows_are_zeros(name: str, rows: int) -> None:
    columns = width(name, 64)
    weight = any_weight(name, rows, columns, np.random.default_rng(SEED))
    layout, whole = ggml_format_of(weight), -(-rows // PAIR) * PAIR
    padded = unpack(packed(weight), layout, (whole, columns))
    if isinstance(padded, PlainTensor):
        assert not bits(padded.values)[rows:].any()
    else:
        assert not bits(padded.scale.block_scales)[rows:].any()
        assert not padded.codes.values()[rows:].any()
        # The sign is flipped in tiles: kernels add the minimum.
        assert padded.minimum is None or not bits(-padded.minimum.block_scales)[rows:].any()


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("shape", [(32, 32), (64, 576), (576, 1536), (32, 4096)])
def test_tiles_are_no_larger_than_the_file(name: str, shape: tuple[int, int]) -> None:
    rows, columns = shape[0], width(name, shape[1])
    weight = any_weight(name, rows, columns, np.random.default_rng(SEED))
    allowed = BLOCKS[name].size_ratio if name in BLOCKS else 1.0
    assert packed_bytes(weight) <= allowed * rows * KINDS[name].nbytes(columns)
    assert packed(weight).nbytes == packed_bytes(weight)


def odd(*, planes: tuple[int, ...] = (4,), group: int = 32, zero: int = 8, minimum: bool = False) -> CodedTensor:
    rows, columns = 32, 256
    field = Scale(torch.zeros(rows, columns // group, dtype=torch.float16))
    codes = integers(np.zeros((rows, columns), np.uint8), planes)
    return CodedTensor((rows, columns), "ODD", group, codes, field, zero, field if minimum else None)


@pytest.mark.parametrize(
    "weight",
    [
        odd(group=64),
        odd(group=128, zero=0, minimum=True),
        odd(zero=0),
        odd(zero=7),
        odd(minimum=True),
        odd(planes=(8,)),
        odd(planes=(8,), zero=128, minimum=True),
        odd(planes=(2, 2)),
        replace(odd(), scale=replace(odd().scale, unit=0.125)),
    ],
    ids=[
        "group 64",
        "group 128",
        "zero 0",
        "zero 7",
        "zero and minimum",
        "8 bits, zero",
        "8 bits, minimum",
        "planes",
        "unit",
    ],
)
def test_weights_without_a_layout_are_rejected_by_type_name(weight: CodedTensor) -> None:
    with pytest.raises(UnsupportedQuantization, match="ODD"):
        ggml_format_of(weight)
    with pytest.raises(UnsupportedQuantization, match="ODD"):
        packed_bytes(weight)


def test_unpacked_weight_can_be_packed_again() -> None:
    """Packing the result of `unpack` gives the same bytes."""
    for name in QUANTIZED:
        columns = width(name, 96)
        weight = any_weight(name, 40, columns, np.random.default_rng(SEED))
        first = packed(weight)
        again = unpack(first, ggml_format_of(weight), (40, columns))
        assert np.array_equal(packed(again), first)
