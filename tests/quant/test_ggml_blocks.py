from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from quant import ggml_blocks
from quant.errors import UnsupportedQuantization
from quant.ggml_blocks import BLOCKS, PLAIN_TYPES, decode, decode_read
from quant.ggml_types import GGMLType, ggml_types
from quant.gguf import GGUFFile
from quant.kernels.reference import dequantize, dequantize_rows
from quant.tensor import CodedTensor, Integers, Plane, Scale
from tests.support.gguf_reader import Reader

KINDS = {kind.name: kind for kind in ggml_types().values()}
QUANTIZED = sorted(BLOCKS)
# types that the gguf package can quantize to
WRITTEN = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "TQ1_0", "TQ2_0"]
SHAPES = [(1, 1), (2, 1), (3, 2), (7, 3), (17, 5), (33, 9), (5, 33), (1, 4), (130, 2), (64, 7)]  # rows, blocks


def same_bits(ours: torch.Tensor, theirs: NDArray[np.float32]) -> bool:
    """Return whether both are equal bit for bit. Any NaN equals any other."""
    mine = ours.numpy()
    both_nan = np.isnan(mine) & np.isnan(theirs)
    return bool(np.all(both_nan | (mine.view(np.uint32) == theirs.reshape(mine.shape).view(np.uint32))))


def oracle(kind: GGMLType, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    with np.errstate(all="ignore"):
        values: NDArray[np.float32] = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind.name])
    return values


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("size", SHAPES)
def test_decoded_quantized_values_equal_the_gguf_package(name: str, size: tuple[int, int]) -> None:
    shape = size[0], size[1] * KINDS[name].block_elements
    values = np.random.default_rng().standard_normal(shape, np.float32)
    raw = gguf.quantize(values, gguf.GGMLQuantizationType[name])
    weight = decode(KINDS[name], memoryview(raw.tobytes()), shape)
    assert weight.shape == shape
    assert same_bits(dequantize(weight), oracle(KINDS[name], raw))


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("size", SHAPES)
def test_decoded_random_bytes_equal_the_gguf_package(name: str, size: tuple[int, int]) -> None:
    kind = KINDS[name]
    shape = size[0], size[1] * kind.block_elements
    raw = np.random.default_rng().integers(0, 256, (shape[0], kind.nbytes(shape[1])), np.uint8)
    weight = decode(kind, memoryview(raw.tobytes()), shape)
    assert same_bits(dequantize(weight), oracle(kind, raw))


@pytest.mark.parametrize("name", QUANTIZED)
def test_matrix_is_read_and_decoded_in_chunks_of_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = KINDS[name]
    shape = 13, 2 * kind.block_elements
    row = kind.nbytes(shape[1])
    raw = np.random.default_rng().integers(0, 256, (shape[0], row), np.uint8)
    data, ranges = memoryview(raw.tobytes()), list[tuple[int, int]]()

    def read(start: int, end: int) -> memoryview:
        ranges.append((start, end))
        return data[start:end]

    monkeypatch.setattr(ggml_blocks, "CHUNK", 5 * shape[1])
    weight = decode_read(kind, read, shape)
    assert ranges == [(0, 5 * row), (5 * row, 10 * row), (10 * row, 13 * row)]
    assert same_bits(dequantize(weight), oracle(kind, raw))


@pytest.mark.parametrize("name", sorted(PLAIN_TYPES))
@pytest.mark.parametrize("shape", [(5,), (3, 7), (2, 3, 4)])
def test_plain_types_keep_their_bits(name: str, shape: tuple[int, ...]) -> None:
    kind = KINDS[name]
    count = int(np.prod(shape))
    raw = np.random.default_rng().integers(0, 256, kind.nbytes(count), np.uint8)
    weight = decode(kind, memoryview(raw.tobytes()), shape)
    assert weight.shape == shape
    assert weight.nbytes == raw.nbytes
    assert same_bits(dequantize(weight), oracle(kind, raw).reshape(shape))


@pytest.mark.parametrize("name", QUANTIZED)
def test_canonical_form_is_no_larger_than_the_file(name: str) -> None:
    kind = KINDS[name]
    columns = 3 * kind.block_elements
    data = bytes(kind.nbytes(11 * columns))
    assert decode(kind, memoryview(data), (11, columns)).nbytes <= BLOCKS[name].size_ratio * len(data)


def test_zero_points_stay_integers_and_scales_stay_float16() -> None:
    raw = gguf.quantize(np.ones((2, 64), np.float32), gguf.GGMLQuantizationType.Q4_0)
    weight = decode(KINDS["Q4_0"], memoryview(raw.tobytes()), (2, 64))
    assert isinstance(weight, CodedTensor)
    assert weight.zero == 8
    assert weight.minimum is None
    assert weight.scale.block_scales.dtype == torch.float16
    assert weight.codes.bits == 4


@pytest.mark.parametrize("name", [*QUANTIZED, "F16"])
def test_dequantized_rows_equal_the_rows_of_the_matrix(name: str) -> None:
    kind = KINDS[name]
    shape = 9, 2 * max(32, kind.block_elements)
    # small bytes: no float16 is NaN
    raw = np.random.default_rng().integers(0, 60, (9, kind.nbytes(shape[1])), np.uint8)
    weight = decode(kind, memoryview(raw.tobytes()), shape)
    rows = torch.tensor([8, 0, 3, 3])
    assert torch.equal(dequantize_rows(weight, rows), dequantize(weight)[rows])


@pytest.mark.parametrize("name", ["IQ2_XXS", "IQ1_M", "Q8_K", "NVFP4", "I32"])
def test_error_names_unsupported_types(name: str) -> None:
    kind = KINDS[name]
    data = memoryview(bytes(kind.nbytes(256)))
    with pytest.raises(UnsupportedQuantization, match=name) as caught:
        decode(kind, data, (1, 256))
    assert "Q4_1" in caught.value.remedy


def test_quantized_tensor_must_be_a_matrix() -> None:
    with pytest.raises(UnsupportedQuantization, match="3 dimensions"):
        decode(KINDS["Q8_0"], memoryview(bytes(34 * 4)), (2, 2, 32))


def test_inconsistent_fields_raise_value_error() -> None:
    codes, scale = Integers((Plane(8, torch.zeros(2, 28, dtype=torch.uint8)),)), Scale(torch.zeros(2, 1).half())
    with pytest.raises(ValueError, match="do not fit"):
        CodedTensor((2, 32), "Q8_0", 32, codes, scale)


def test_every_tensor_of_the_default_model_equals_the_gguf_package(smollm2: Path) -> None:
    packed = stored = 0
    reader = Reader(smollm2)
    with GGUFFile(smollm2) as file:
        for tensor in reader.tensors:
            entry = file.tensors[tensor.name]
            weight = decode(entry.type, file.data(tensor.name), entry.shape)
            packed, stored = packed + weight.nbytes, stored + entry.nbytes
            assert same_bits(dequantize(weight), oracle(entry.type, tensor.data)), tensor.name
    assert packed <= 1.03 * stored
