"""Packing moves bits and nothing else: what is packed comes back, takes no more room, or is refused by name."""

import numpy as np
import pytest
import torch

from quant.cpu.tiles import FORMATS, PAIR, format_of, pack, packed_bytes, unpack
from quant.errors import UnsupportedQuantization
from quant.ggml_blocks import AFFINE_BLOCKS, PLAIN_TYPES
from quant.kernels.reference import dequantize
from quant.tensor import AffineTensor, PlainTensor, QTensor
from tests.quant.cpu.random_weights import QUANTIZED, TYPES, any_weight, bits, random_weight

SEED = 1
SHAPES = [(1, 32), (15, 64), (16, 96), (17, 32), (31, 160), (32, 32), (33, 64), (64, 288), (100, 96)]


def packed(weight: QTensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Into memory that was used before: every byte of it has to be written."""
    out = np.full(packed_bytes(weight), 0xA5, np.uint8)
    pack(weight, out)
    return out


def test_every_type_of_the_files_has_a_layout() -> None:
    rng = np.random.default_rng(SEED)
    assert set(TYPES) == {*AFFINE_BLOCKS, *PLAIN_TYPES}
    assert {format_of(random_weight(name, 1, 32, rng)) for name in TYPES} == set(FORMATS)
    assert [layout.number for layout in FORMATS] == list(range(len(FORMATS)))


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_unpacking_gives_back_every_bit(name: str, shape: tuple[int, int]) -> None:
    weight = any_weight(name, *shape, np.random.default_rng(SEED))
    again = unpack(packed(weight), format_of(weight), shape)
    assert again.shape == shape
    if isinstance(weight, PlainTensor):
        assert isinstance(again, PlainTensor)
        assert again.values.dtype is weight.values.dtype
        assert torch.equal(bits(again.values), bits(weight.values))
        return
    assert isinstance(again, AffineTensor)
    assert (again.bits, again.group, again.zero) == (weight.bits, weight.group, weight.zero)
    assert torch.equal(again.codes, weight.codes)
    assert torch.equal(bits(again.scales), bits(weight.scales))
    assert (again.minimums is None) == (weight.minimums is None)
    if weight.minimums is not None and again.minimums is not None:
        assert torch.equal(bits(again.minimums), bits(weight.minimums))


@pytest.mark.parametrize("name", TYPES)
def test_values_stay_what_they_are(name: str) -> None:
    weight = random_weight(name, 50, 128, np.random.default_rng(SEED))
    again = unpack(packed(weight), format_of(weight), (50, 128))
    assert torch.equal(bits(dequantize(again)), bits(dequantize(weight)))


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("rows", [1, 16, 17, 33])
def test_rows_that_are_not_there_are_zeros(name: str, rows: int) -> None:
    weight = any_weight(name, rows, 64, np.random.default_rng(SEED))
    layout, whole = format_of(weight), -(-rows // PAIR) * PAIR
    padded = unpack(packed(weight), layout, (whole, 64))
    if isinstance(padded, PlainTensor):
        assert not bits(padded.values)[rows:].any()
    else:
        assert not bits(padded.scales)[rows:].any()
        assert padded.minimums is None or not bits(-padded.minimums)[rows:].any()  # kernels add what is stored


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("shape", [(32, 32), (64, 576), (576, 1536), (32, 4096)])
def test_tiles_take_no_more_room_than_the_file(name: str, shape: tuple[int, int]) -> None:
    weight = any_weight(name, *shape, np.random.default_rng(SEED))
    assert packed_bytes(weight) <= 1.03 * weight.nbytes
    assert packed(weight).nbytes == packed_bytes(weight)


def affine(*, bits: int = 4, group: int = 32, zero: int = 8, minimums: bool = False) -> AffineTensor:
    rows, columns = 32, 256
    field = torch.zeros(rows, columns // group, dtype=torch.float16)
    return AffineTensor(
        shape=(rows, columns),
        type_name="ODD",
        bits=bits,
        group=group,
        codes=torch.zeros(rows, columns * bits // 8, dtype=torch.int8 if bits == 8 else torch.uint8),
        scales=field,
        zero=zero,
        minimums=field if minimums else None,
    )


@pytest.mark.parametrize(
    "weight",
    [
        affine(group=64),
        affine(group=128, zero=0, minimums=True),
        affine(zero=0),
        affine(zero=7),
        affine(minimums=True),
        affine(bits=8),
        affine(bits=8, zero=0, minimums=True),
    ],
    ids=["group 64", "group 128", "zero 0", "zero 7", "zero and minimum", "8 bits, zero", "8 bits, minimum"],
)
def test_what_has_no_layout_is_refused_by_name(weight: AffineTensor) -> None:
    with pytest.raises(UnsupportedQuantization, match="ODD"):
        format_of(weight)
    with pytest.raises(UnsupportedQuantization, match="ODD"):
        packed_bytes(weight)


def test_the_packed_form_has_a_layout_itself() -> None:
    """What `unpack` gives is a weight like any other: it can be packed again, into the same bytes."""
    for name in QUANTIZED:
        weight = any_weight(name, 40, 96, np.random.default_rng(SEED))
        first = packed(weight)
        again = unpack(first, format_of(weight), (40, 96))
        assert np.array_equal(packed(again), first)
