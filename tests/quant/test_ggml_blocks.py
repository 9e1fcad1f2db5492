from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from quant.errors import UnsupportedQuantization
from quant.ggml_blocks import AFFINE_BLOCKS, PLAIN_TYPES, decode
from quant.ggml_types import GGML_TYPES, GGMLType
from quant.gguf import GGUFFile
from quant.kernels.reference import dequantize, dequantize_rows
from quant.tensor import AffineTensor

KINDS = {kind.name: kind for kind in GGML_TYPES.values()}
QUANTIZED = sorted(AFFINE_BLOCKS)
SHAPES = [(1, 32), (3, 64), (7, 96), (5, 1056), (33, 288)]


def same_bits(ours: torch.Tensor, theirs: NDArray[np.float32]) -> bool:
    """Equal to the last bit; any NaN equals any other."""
    mine = ours.numpy()
    both_nan = np.isnan(mine) & np.isnan(theirs)
    return bool(np.all(both_nan | (mine.view(np.uint32) == theirs.reshape(mine.shape).view(np.uint32))))


def oracle(kind: GGMLType, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    with np.errstate(all="ignore"):
        values: NDArray[np.float32] = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind.name])
    return values


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_gguf_package_on_real_values(name: str, shape: tuple[int, int]) -> None:
    values = np.random.default_rng().standard_normal(shape, np.float32)
    raw = gguf.quantize(values, gguf.GGMLQuantizationType[name])
    weight = decode(KINDS[name], memoryview(raw.tobytes()), shape)
    assert weight.shape == shape
    assert same_bits(dequantize(weight), oracle(KINDS[name], raw))


@pytest.mark.parametrize("name", QUANTIZED)
def test_equals_the_gguf_package_on_any_bytes(name: str) -> None:
    rows, columns, kind = 17, 160, KINDS[name]
    raw = np.random.default_rng().integers(0, 256, (rows, kind.nbytes(columns)), np.uint8)
    weight = decode(kind, memoryview(raw.tobytes()), (rows, columns))
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
def test_packed_is_no_larger_than_the_file(name: str) -> None:
    kind, shape = KINDS[name], (11, 320)
    data = bytes(kind.nbytes(11 * 320))
    assert decode(kind, memoryview(data), shape).nbytes <= 1.03 * len(data)


def test_zero_points_stay_integers_and_scales_stay_narrow() -> None:
    raw = gguf.quantize(np.ones((2, 64), np.float32), gguf.GGMLQuantizationType.Q4_0)
    weight = decode(KINDS["Q4_0"], memoryview(raw.tobytes()), (2, 64))
    assert isinstance(weight, AffineTensor)
    assert weight.zero == 8
    assert weight.minimums is None
    assert weight.scales.dtype == torch.float16
    assert weight.codes.dtype == torch.uint8


@pytest.mark.parametrize("name", [*QUANTIZED, "F16"])
def test_rows_are_the_rows_of_the_whole(name: str) -> None:
    values = np.random.default_rng().standard_normal((9, 64), np.float32)
    raw = gguf.quantize(values, gguf.GGMLQuantizationType[name])
    weight = decode(KINDS[name], memoryview(raw.tobytes()), (9, 64))
    rows = torch.tensor([8, 0, 3, 3])
    assert torch.equal(dequantize_rows(weight, rows), dequantize(weight)[rows])


@pytest.mark.parametrize("name", ["Q4_K", "IQ2_XXS", "I32"])
def test_refuses_other_types_by_name(name: str) -> None:
    kind = KINDS[name]
    data = memoryview(bytes(kind.nbytes(256)))
    with pytest.raises(UnsupportedQuantization, match=name) as caught:
        decode(kind, data, (1, 256))
    assert "Q4_1" in caught.value.remedy


def test_refuses_quantized_stacks() -> None:
    with pytest.raises(UnsupportedQuantization, match="3 dimensions"):
        decode(KINDS["Q8_0"], memoryview(bytes(34 * 4)), (2, 2, 32))


def test_parts_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        AffineTensor((2, 32), "Q8_0", 8, 32, torch.zeros(2, 31, dtype=torch.int8), torch.zeros(2, 1))


def test_every_tensor_of_the_default_model(smollm2: Path) -> None:
    packed = stored = 0
    reader = gguf.GGUFReader(smollm2)
    with GGUFFile(smollm2) as file:
        for tensor in reader.tensors:
            entry = file.tensors[tensor.name]
            weight = decode(entry.type, file.data(tensor.name), entry.shape)
            packed, stored = packed + weight.nbytes, stored + entry.nbytes
            assert same_bits(dequantize(weight), oracle(entry.type, tensor.data)), tensor.name
    assert packed <= 1.03 * stored
