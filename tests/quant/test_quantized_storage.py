"""Quantized layers are written and read back bit for bit."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quant import bitsandbytes, compressed_tensors, float8
from quant.errors import UnsupportedQuantization
from quant.quantize import fp8, int4, nf4
from quant.quantized_storage import Method, storage
from quant.safetensors_shards import SafetensorsShards
from quant.safetensors_values import TYPE_NAMES, as_bytes
from quant.safetensors_writer import Entry, SafetensorsWriter
from quant.tensor import PlainTensor
from tests.quant.canonical_bits import same

ROWS = st.integers(1, 20)
TYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])


def random(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> PlainTensor:
    return PlainTensor((rows, columns), "?", torch.randn(rows, columns).to(dtype))


def sections(method: Method, columns: int) -> object:
    return storage(method, [columns]).section(["lm_head"])


def encoded(method: Method, plain: PlainTensor) -> Mapping[str, Tensor]:
    return storage(method, [plain.shape[1]]).encode(plain, None)


@given(ROWS, st.integers(1, 4), st.sampled_from([32, 64, 128, None]), TYPES)
def test_int4_layer_is_read_back(rows: int, groups: int, group: int | None, dtype: torch.dtype) -> None:
    plain, method = random(rows, groups * (group or 128), dtype), Method("int4", group)
    config = compressed_tensors.PackQuantized.read(sections(method, plain.shape[1]), "l")
    decoded = compressed_tensors.decode("l", encoded(method, plain), config)
    assert same(decoded, int4(plain, group))


@given(ROWS, st.integers(1, 6), st.booleans(), TYPES)
def test_nf4_layer_is_read_back(rows: int, blocks: int, nested: bool, dtype: torch.dtype) -> None:
    plain, method = random(rows, 64 * blocks, dtype), Method("nf4", nested=nested)
    config = bitsandbytes.BitsAndBytes.read(sections(method, plain.shape[1]))
    assert same(bitsandbytes.decode("l", encoded(method, plain), config), nf4(plain, nested=nested))


@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (64, 128)])
def test_fp8_layer_is_read_back(tmp_path: Path, shape: tuple[int, int]) -> None:
    plain, method = random(*shape), Method("fp8")
    with SafetensorsWriter(tmp_path) as writer:
        for name, values in encoded(method, plain).items():
            writer.add(Entry(f"l.{name}", TYPE_NAMES[values.dtype], tuple(values.shape), as_bytes(values)))
    section = sections(method, shape[1])
    assert isinstance(section, dict)
    with SafetensorsShards(tmp_path) as checkpoint:
        assert same(float8.take(checkpoint, "l.weight", float8.read_scheme(section)), fp8(plain))


@pytest.mark.parametrize("method", [Method("fp8"), Method("int4", 32), Method("int4"), Method("nf4")])
def test_weights_take_at_most_the_stated_bits(method: Method) -> None:
    stored = storage(method, [128])
    plain = random(512, 128)
    small = sum(values.nbytes for name, values in stored.encode(plain, None).items() if values.numel() <= 256)
    assert sum(values.nbytes for values in stored.encode(plain, None).values()) - small <= stored.bits * 512 * 128 / 8


@pytest.mark.parametrize("method", [Method("int4"), Method("int4", 64), Method("nf4")])
def test_indivisible_columns_are_rejected(method: Method) -> None:
    with pytest.raises(UnsupportedQuantization):
        storage(method, [4096, 48])


def test_pack_quantized_requires_integer_zero_points() -> None:
    with pytest.raises(ValueError, match="integer zero points"):
        compressed_tensors.encode(nf4(random(2, 64)))
