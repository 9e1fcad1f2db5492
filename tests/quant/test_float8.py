import tracemalloc
from collections.abc import Mapping
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from quant.errors import ModelFileError, UnsupportedQuantization
from quant.float8 import CHANNEL, TENSOR, Float8Scheme, read_scheme, take
from quant.kernels.reference import dequantize, dequantize_rows
from quant.linear import ReferenceBackend
from quant.safetensors import SAFETENSORS_TYPES, SafetensorsTensor
from quant.safetensors_shards import SafetensorsShards
from quant.tensor import Float8Tensor, PlainTensor
from tests.quant.safetensors_bytes import build

Floats = NDArray[np.float32]

BLOCKS = Float8Scheme((128, 128), ("weight_scale_inv",))
DEEPSEEK = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


class Checkpoint:
    """Tensors in memory: type, shape, and bytes by name."""

    def __init__(self, **tensors: tuple[str, tuple[int, ...], bytes]) -> None:
        self.path = Path("memory")
        named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
        self.tensors: Mapping[str, SafetensorsTensor] = {
            name: SafetensorsTensor(name, SAFETENSORS_TYPES[kind], shape, 0, len(raw))
            for name, (kind, shape, raw) in named.items()
        }
        self._raw = {name: raw for name, (_, _, raw) in named.items()}

    def data(self, name: str) -> memoryview:
        return memoryview(self._raw[name])


def number(kind: str, byte: int) -> float:
    """Return the value of a byte by the definition of the format: sign, exponent, fraction, subnormals."""
    fraction_bits, bias = (3, 7) if kind == "F8_E4M3" else (2, 15)
    sign, rest = -1.0 if byte & 0x80 else 1.0, byte & 0x7F
    exponent, fraction = rest >> fraction_bits, (rest & (1 << fraction_bits) - 1) / (1 << fraction_bits)
    if kind == "F8_E4M3" and rest == 0x7F:
        return float("nan")
    if kind == "F8_E5M2" and exponent == 31:
        return float("nan") if fraction else sign * float("inf")
    return sign * (2.0 ** (exponent - bias) * (1 + fraction) if exponent else 2.0 ** (1 - bias) * fraction)


def expected(kind: str, raw: NDArray[np.uint8], scales: Floats, block: tuple[int, int]) -> Floats:
    """Apply the published formula block by block."""
    table = np.array([number(kind, byte) for byte in range(256)], np.float32)
    values = table[raw]
    for down in range(scales.shape[0]):
        for across in range(scales.shape[1]):
            rows = slice(down * block[0], (down + 1) * block[0])
            columns = slice(across * block[1], (across + 1) * block[1])
            with np.errstate(all="ignore"):
                values[rows, columns] = values[rows, columns] * scales[down, across]
    return values


def same_bits(ours: Tensor, theirs: Floats) -> bool:
    """Return whether both are equal bit for bit. Any NaN equals any other."""
    mine = ours.numpy()
    return bool(np.all((np.isnan(mine) & np.isnan(theirs)) | (mine.view(np.uint32) == theirs.view(np.uint32))))


def scale_bytes(kind: str, count: int, rng: np.random.Generator) -> tuple[bytes, Floats]:
    """Return random scales of a type, and their values as floats."""
    if kind == "F8_E8M0":
        exponents = rng.integers(100, 155, count)
        return exponents.astype(np.uint8).tobytes(), (2.0 ** (exponents - 127.0)).astype(np.float32)
    floats = rng.uniform(1e-4, 1.0, count).astype(np.float32)
    if kind == "F16":
        return floats.astype(np.float16).tobytes(), floats.astype(np.float16).astype(np.float32)
    if kind == "BF16":
        cut = floats.view(np.uint32) & np.uint32(0xFFFF0000)
        return (cut >> np.uint32(16)).astype(np.uint16).tobytes(), cut.view(np.float32)
    return floats.tobytes(), floats


SHAPES = st.tuples(st.integers(1, 300), st.integers(1, 300))
SCHEMES = st.one_of(
    st.just(TENSOR), st.just(CHANNEL), st.tuples(st.integers(1, 140), st.integers(1, 140)), st.just((128, 128))
)


@hypothesis.given(
    shape=SHAPES,
    block=SCHEMES,
    kind=st.sampled_from(["F8_E4M3", "F8_E5M2"]),
    scale_kind=st.sampled_from(["F32", "BF16", "F16", "F8_E8M0"]),
    seed=st.integers(0, 2**32),
)
@hypothesis.settings(max_examples=60)
def test_weights_equal_the_published_formula(
    shape: tuple[int, int], block: tuple[int | None, int | None], kind: str, scale_kind: str, seed: int
) -> None:
    """Shapes include partial blocks at both edges. Every bit of the values is equal, and so is the size in bytes."""
    rng = np.random.default_rng(seed)
    rows, columns = shape
    height, width = block[0] or rows, block[1] or columns
    grid = -(-rows // height), -(-columns // width)
    raw = rng.integers(0, 256, shape, np.uint8)
    scale_raw, scales = scale_bytes(scale_kind, grid[0] * grid[1], rng)
    checkpoint = Checkpoint(x__weight=(kind, shape, raw.tobytes()), x__weight_scale=(scale_kind, grid, scale_raw))
    weight = take(checkpoint, "x.weight", Float8Scheme(block))
    assert isinstance(weight, Float8Tensor)
    assert weight.nbytes == raw.nbytes + len(scale_raw)
    assert weight.type_name == kind
    theirs = expected(kind, raw, scales.reshape(grid), (height, width))
    assert same_bits(dequantize(weight), theirs)
    index = torch.from_numpy(rng.integers(0, rows, 5))
    assert same_bits(dequantize_rows(weight, index), theirs[index.numpy()])


@pytest.mark.parametrize("kind", ["F8_E4M3", "F8_E5M2"])
def test_every_byte_value_is_decoded(kind: str) -> None:
    checkpoint = Checkpoint(
        w__weight=(kind, (16, 16), bytes(range(256))), w__weight_scale=("F32", (), np.float32(1).tobytes())
    )
    weight = take(checkpoint, "w.weight", Float8Scheme(TENSOR))
    theirs = np.array([number(kind, byte) for byte in range(256)], np.float32).reshape(16, 16)
    assert same_bits(dequantize(weight), theirs)


@pytest.mark.parametrize(
    ("scheme", "shape", "spellings"),
    [
        (TENSOR, (3, 4), [(), (1,), (1, 1)]),
        (CHANNEL, (3, 4), [(3,), (3, 1)]),
        (CHANNEL, (1, 4), [(), (1,), (1, 1)]),
        ((2, 2), (3, 5), [(2, 3)]),
        ((128, 128), (3, 4), [(), (1,), (1, 1)]),
        ((2, 4), (3, 4), [(2,), (2, 1)]),
    ],
)
def test_scales_of_a_wrong_shape_are_rejected(
    scheme: tuple[int | None, int | None], shape: tuple[int, int], spellings: list[tuple[int, ...]]
) -> None:
    candidates = [(), (1,), (2,), (3,), (4,), (1, 1), (3, 1), (1, 3), (1, 4), (2, 3), (3, 2), (2, 1), (3, 4), (1, 1, 1)]
    for candidate in candidates:
        raw = np.ones(candidate, np.float32).tobytes()
        checkpoint = Checkpoint(
            w__weight=("F8_E4M3", shape, bytes(shape[0] * shape[1])), w__weight_scale=("F32", candidate, raw)
        )
        if candidate in spellings:
            take(checkpoint, "w.weight", Float8Scheme(scheme))
        else:
            with pytest.raises(ModelFileError, match=r"w\.weight_scale has shape"):
                take(checkpoint, "w.weight", Float8Scheme(scheme))


EIGHT = ("F8_E4M3", (2, 2), bytes(4))
SCALE = ("F32", (), bytes(4))


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({"w__weight": EIGHT}, "no tensor w.weight_scale"),
        ({"w__weight_scale": SCALE}, "no tensor w.weight"),
        ({"w__weight": EIGHT, "w__weight_scale": SCALE, "w__weight_scale_inv": SCALE}, "several scales"),
        ({"w__weight": EIGHT, "w__weight_scale": ("I32", (), bytes(4))}, "w.weight_scale is of type I32"),
        ({"w__weight": EIGHT, "w__weight_scale": ("F64", (), bytes(8))}, "F64"),
        ({"w__weight": ("F8_E4M3", (1, 2, 2), bytes(4)), "w__weight_scale": SCALE}, "not a matrix"),
        ({"w__weight": ("F8_E4M3", (4,), bytes(4)), "w__weight_scale": SCALE}, "not a matrix"),
        ({"w__weight": ("F8_E4M3", (0, 4), b""), "w__weight_scale": SCALE}, "not a matrix"),
        ({"w__weight": ("F8_E4M3FNUZ", (2, 2), bytes(4)), "w__weight_scale": SCALE}, "F8_E4M3FNUZ"),
        ({"w__weight": ("I8", (2, 2), bytes(4)), "w__weight_scale": SCALE}, "w.weight is stored as I8"),
    ],
)
def test_error_names_inconsistent_tensors(tensors: dict[str, tuple[str, tuple[int, ...], bytes]], problem: str) -> None:
    with pytest.raises(ModelFileError, match=problem):
        take(Checkpoint(**tensors), "w.weight", Float8Scheme(TENSOR, ("weight_scale", "weight_scale_inv")))


def test_take_copies_the_weight_once() -> None:
    checkpoint = Checkpoint(w__weight=("F8_E4M3", (1024, 1024), bytes(1 << 20)), w__weight_scale=SCALE)
    tracemalloc.start()
    weight = take(checkpoint, "w.weight", Float8Scheme(TENSOR))
    assert tracemalloc.get_traced_memory()[1] < weight.nbytes + (1 << 16)
    tracemalloc.stop()


def test_unquantized_modules_are_plain() -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    weight = take(Checkpoint(head__weight=("F32", (2, 3), values.tobytes())), "head.weight", BLOCKS)
    assert isinstance(weight, PlainTensor)
    assert same_bits(dequantize(weight), values)


def test_deepseek_layer_is_read_and_multiplied(tmp_path: Path) -> None:
    """Reads the configuration and a layer of a DeepSeek checkpoint, and multiplies by the layer after the file is
    closed.
    """
    values = torch.randn(200, 300)
    scales = torch.rand(2, 3) + 0.5
    stored = (values / scales.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]).to(
        torch.float8_e4m3fn
    )
    path = tmp_path / "model.safetensors"
    path.write_bytes(
        build(
            {
                "q.weight": ("F8_E4M3", [200, 300], stored.view(torch.uint8).numpy().tobytes()),
                "q.weight_scale_inv": ("F32", [2, 3], scales.numpy().tobytes()),
            }
        )
    )
    with SafetensorsShards(tmp_path) as checkpoint:
        weight = take(checkpoint, "q.weight", read_scheme(DEEPSEEK))
    x = torch.randn(5, 300)
    for kept in (True, False):
        layer = ReferenceBackend(keep_dequantized=kept).linear([weight, weight])
        torch.testing.assert_close(layer.dequantize()[:200], values, rtol=0.07, atol=0.01)
        torch.testing.assert_close(layer.forward(x), x @ layer.dequantize().T, rtol=1e-5, atol=1e-4)
    rows = ReferenceBackend(keep_dequantized=False).linear([weight]).rows(torch.tensor([199, 0]))
    assert torch.equal(rows, dequantize(weight)[[199, 0]])


def compressed(**weights: object) -> dict[str, object]:
    """Return the section of a compressed-tensors checkpoint with these weights."""
    known: dict[str, object] = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    group = {"targets": ["Linear"], "weights": {**known, "dynamic": False, "group_size": None, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "sparsity_config": {"format": "dense"},
        "ignore": ["lm_head"],
    }


@pytest.mark.parametrize(
    ("section", "scheme"),
    [
        (DEEPSEEK, BLOCKS),
        ({**DEEPSEEK, "scale_fmt": "ue8m0", "modules_to_not_convert": ["lm_head"]}, BLOCKS),
        (
            {"quant_method": "fp8", "weight_block_size": None},
            Float8Scheme(TENSOR, ("weight_scale_inv", "weight_scale")),
        ),
        (
            {"quant_method": "fp8", "activation_scheme": "static"},
            Float8Scheme(TENSOR, ("weight_scale_inv", "weight_scale")),
        ),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, Float8Scheme(CHANNEL)),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, Float8Scheme(TENSOR)),
        (compressed(), Float8Scheme(CHANNEL)),
        (compressed(strategy="tensor"), Float8Scheme(TENSOR)),
        (compressed(strategy="block", block_structure=[128, 64]), Float8Scheme((128, 64))),
    ],
)
def test_configurations_of_published_checkpoints_are_read(section: dict[str, object], scheme: Float8Scheme) -> None:
    assert read_scheme(section) == scheme


@pytest.mark.parametrize(
    ("section", "names"),
    [
        ({}, "quant_method is missing"),
        ({"quant_method": "gptq"}, "quant_method is gptq"),
        ({"quant_method": ["fp8"]}, "quant_method is of another type"),
        ({**DEEPSEEK, "fmt": "e3m4"}, "fmt is e3m4"),
        ({**DEEPSEEK, "scale_fmt": "\x1b[2J"}, "scale_fmt is '"),
        ({**DEEPSEEK, "expert_dtype": "fp4"}, "expert_dtype is fp4"),
        ({**DEEPSEEK, "weight_block_size": [128]}, "weight_block_size"),
        ({**DEEPSEEK, "weight_block_size": [128, 0]}, "weight_block_size"),
        ({**DEEPSEEK, "weight_block_size": [True, True]}, "weight_block_size"),
        ({**DEEPSEEK, "weight_block_size": "128x128"}, "weight_block_size"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo is NVFP4"),
        ({"quant_method": "modelopt"}, "quant_algo is missing"),
        ({**compressed(), "format": "pack-quantized"}, "format is pack-quantized"),
        ({**compressed(), "quantization_status": "frozen"}, "quantization_status is frozen"),
        ({**compressed(), "sparsity_config": {"format": "sparse-24-bitmask"}}, "format is sparse-24-bitmask"),
        ({**compressed(), "sparsity_config": "dense"}, "sparsity_config is not a section"),
        ({**compressed(), "transform_config": {"groups": {}}}, "transform_config"),
        ({**compressed(), "config_groups": {}}, "config_groups"),
        ({**compressed(), "config_groups": {"a": 1}}, "a is not a section"),
        ({**compressed(), "config_groups": {"a": {"weights": None}}}, "num_bits is missing"),
        (compressed(num_bits=4), "num_bits is 4"),
        (compressed(num_bits=8.0), "num_bits is 8.0"),
        (compressed(type="int"), "type is int"),
        (compressed(symmetric=False), "symmetric is False"),
        (compressed(dynamic=True), "dynamic is True"),
        (compressed(strategy="group"), "strategy is group"),
        (compressed(strategy="block", block_structure=None), "block_structure"),
    ],
)
def test_error_names_unsupported_configurations(section: dict[str, object], names: str) -> None:
    with pytest.raises(UnsupportedQuantization) as caught:
        read_scheme(section)
    assert names in str(caught.value)
    assert str(caught.value).isprintable()


def test_config_groups_must_be_equal() -> None:
    section = compressed()
    other = compressed(strategy="tensor")["config_groups"]
    assert isinstance(other, dict)
    mine = section["config_groups"]
    assert isinstance(mine, dict)
    section["config_groups"] = {**mine, "group_1": other["group_0"]}
    with pytest.raises(UnsupportedQuantization, match="2 kinds"):
        read_scheme(section)
    section["config_groups"] = {**mine, "group_1": mine["group_0"]}
    assert read_scheme(section) == Float8Scheme(CHANNEL)


def test_huge_block_is_limited_to_the_matrix() -> None:
    scheme = read_scheme({**DEEPSEEK, "weight_block_size": [2**62, 2**62]})
    checkpoint = Checkpoint(w__weight=EIGHT, w__weight_scale_inv=("F32", (1, 1), bytes(4)))
    weight = take(checkpoint, "w.weight", scheme)
    assert isinstance(weight, Float8Tensor)
    assert weight.block == (2, 2)
    assert dequantize(weight).shape == (2, 2)


def test_inconsistent_fields_raise_value_error() -> None:
    values = torch.zeros(4, 4).to(torch.float8_e4m3fn)
    for shape, scale, block in [
        ((4, 5), torch.ones(1, 1), (4, 5)),
        ((4, 4), torch.ones(1, 2), (4, 4)),
        ((4, 4), torch.ones(1, 1), (5, 4)),
        ((4, 4), torch.ones(1, 1), (0, 4)),
        ((4, 4), torch.ones(1), (4, 4)),
    ]:
        with pytest.raises(ValueError, match="do not fit"):
            Float8Tensor(shape, "F8_E4M3", values, scale, block)
