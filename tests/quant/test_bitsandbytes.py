"""bitsandbytes layers: decoding and encoding agree with the package, and unsupported layers are rejected."""

import json

import numpy as np
import pytest
import torch
from bitsandbytes import functional

from quant.bitsandbytes import BitsAndBytes, decode, encode
from quant.errors import ModelFileError, UnsupportedQuantization
from quant.kernels.reference import dequantize
from quant.quantize import nf4
from quant.tensor import PlainTensor
from tests.quant.checkpoint_layers import Layer, decoded, eight_bit_layer, four_bit_layer

FOUR = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
STATE = "weight.quant_state.bitsandbytes__nf4"


# -- comparisons with the package


def random_matrix(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Return rows of very different magnitudes; the last is zero."""
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * columns))
    values *= torch.logspace(-3, 0.5, rows).unsqueeze(-1)
    values[-1] = 0
    return values.to(dtype)


def package_layer(
    values: torch.Tensor, table: str, block: int, *, nested: bool
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the tensors that the package saves for a 4-bit layer, and the weights that it reads back."""
    codes, state = functional.quantize_4bit(values, blocksize=block, compress_statistics=nested, quant_type=table)
    saved = {f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    return {"weight": codes, **saved}, functional.dequantize_4bit(codes, state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("table", "block"), [("nf4", 64), ("nf4", 128), ("fp4", 32), ("fp4", 64)])
def test_four_bit_weights_equal_the_package(table: str, block: int, nested: bool, dtype: torch.dtype) -> None:
    tensors, values = package_layer(random_matrix(33, 384, dtype), table, block, nested=nested)
    assert torch.equal(dequantize(decode("l", tensors, BitsAndBytes(table))).to(dtype), values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_encoded_nf4_equals_the_package(dtype: torch.dtype) -> None:
    values = random_matrix(64, 512, dtype)
    theirs, _ = package_layer(values, "nf4", 64, nested=False)
    ours = encode(nf4(PlainTensor((64, 512), "F32", values)), dtype)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name].flatten(), theirs[name].flatten()) for name in ours)


def test_encoded_nested_scales_are_at_least_as_near_as_the_package() -> None:
    """For some scales near the midpoint of two numbers, the package's CPU kernel chooses the farther one."""
    values = random_matrix(64, 512, torch.float32)
    theirs, _ = package_layer(values, "nf4", 64, nested=True)
    ours = encode(nf4(PlainTensor((64, 512), "F32", values), nested=True), torch.float32)
    assert ours.keys() == theirs.keys()
    same = {name for name in ours if torch.equal(ours[name].flatten(), theirs[name].flatten())}
    assert ours.keys() - same <= {"weight.absmax"}
    offset = json.loads(bytes(ours[STATE].numpy()))["nested_offset"]
    largest = ours["weight.nested_absmax"].repeat_interleave(256)
    exact = values.view(-1, 64).abs().amax(-1)
    mine, other = (
        (tensors["weight.nested_quant_map"][tensors["weight.absmax"].int().flatten()] * largest + offset - exact).abs()
        for tensors in (ours, theirs)
    )
    assert (mine <= other + 1e-7).all()
    assert (mine == other).float().mean() > 0.98


def test_eight_bit_weights_equal_the_package() -> None:
    """Rounding differs: the package multiplies the codes by the scale first, and then by 1/127."""
    codes, scales, _ = functional.int8_vectorwise_quant(random_matrix(33, 384, torch.float16))
    ours = dequantize(decode("l", {"weight": codes, "SCB": scales}, BitsAndBytes(None)))
    torch.testing.assert_close(ours, functional.int8_vectorwise_dequant(codes, scales), rtol=2.5e-7, atol=0)


# -- hand-made layers


def layer(*, nested: bool = False) -> Layer:
    return four_bit_layer(np.random.default_rng(4), 6, 64, 16, nested=nested)


def state_bytes(values: object) -> torch.Tensor:
    return torch.tensor(list(json.dumps(values).encode()), dtype=torch.uint8)


def with_state(example: Layer, **change: object) -> Layer:
    values = json.loads(bytes(example.tensors[STATE].numpy())) | change
    example.tensors[STATE] = state_bytes(values)
    return example


def test_the_first_element_is_in_the_high_half() -> None:
    example = four_bit_layer(np.random.default_rng(0), 1, 4, 2)
    example.tensors["weight"] = torch.tensor([[0xF0], [0x7F]], dtype=torch.uint8)
    example.tensors["weight.absmax"] = torch.tensor([2.0, 3.0])
    assert dequantize(decoded(example)).tolist() == [[2, -2, 0, 3]]


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float32])
def test_four_bit_bytes_may_have_another_type(storage: torch.dtype) -> None:
    example = layer()
    example.tensors["weight"] = example.tensors["weight"].flatten().view(storage).unsqueeze(1)
    assert torch.equal(dequantize(decoded(example)), torch.from_numpy(example.values))


def test_quantization_config_is_read() -> None:
    assert BitsAndBytes.read(FOUR) == BitsAndBytes("nf4")
    assert BitsAndBytes.read({"quant_method": "bitsandbytes", "load_in_4bit": True}) == BitsAndBytes("fp4")
    assert BitsAndBytes.read({"quant_method": "bitsandbytes", "load_in_8bit": True}) == BitsAndBytes(None)


@pytest.mark.parametrize(
    "change", [{"load_in_8bit": True}, {"load_in_4bit": False}, {"bnb_4bit_quant_type": "af4"}, {"quant_method": "hqq"}]
)
def test_error_names_unsupported_values(change: dict[str, object]) -> None:
    with pytest.raises(UnsupportedQuantization, match=r"quantization_config\.(load_in|bnb_4bit_quant_type|quant_m)"):
        BitsAndBytes.read(FOUR | change)


def test_unknown_quant_map_is_rejected() -> None:
    example = layer()
    example.tensors["weight.quant_map"][3] += 0.01
    with pytest.raises(ModelFileError, match="quant_map is not the nf4 table"):
        decoded(example)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"quant_type": "fp4"}, "quant_type is 'fp4'"),
        ({"shape": [6, 64, 1]}, "shape is a list"),
        ({"shape": [12, 64]}, "has 192 bytes for 12 by 64"),
        ({"blocksize": 0}, "blocksize is 0"),
        ({"blocksize": 48}, "straddle the rows"),
        ({"blocksize": 32}, "absmax has shape"),
        ({"nested_blocksize": -1}, "nested_blocksize is -1"),
        ({"nested_blocksize": 4}, "nested_absmax has shape"),
        ({"nested_offset": None}, "nested_offset is missing"),
        ({"nested_offset": float("nan")}, "nested_offset is nan"),
        ({"nested_offset": 10**400}, "nested_offset is 1000"),
    ],
)
def test_inconsistent_quant_state_is_rejected(change: dict[str, object], problem: str) -> None:
    with pytest.raises(ModelFileError, match=problem):
        decoded(with_state(layer(nested=True), **change))


@pytest.mark.parametrize("data", [b"{", b"\xff\xfe", b"[" * 60_000, b"1" * 10_000, b"[]"])
def test_quant_state_must_be_a_json_object(data: bytes) -> None:
    example = layer()
    example.tensors[STATE] = torch.tensor(list(data), dtype=torch.uint8)
    with pytest.raises(ModelFileError, match=STATE):
        decoded(example)


def test_oversized_quant_state_is_rejected() -> None:
    example = layer()
    padding = torch.full((1 << 16,), ord(" "), dtype=torch.uint8)
    example.tensors[STATE] = torch.cat([example.tensors[STATE], padding])
    with pytest.raises(ModelFileError, match="more than 65536"):
        decoded(example)


def test_rows_of_an_odd_number_of_codes_are_rejected() -> None:
    example = with_state(four_bit_layer(np.random.default_rng(0), 4, 6, 3), shape=[8, 3])
    with pytest.raises(UnsupportedQuantization, match="straddle"):
        decoded(example)


def test_other_eight_bit_layouts_are_rejected() -> None:
    example = eight_bit_layer(np.random.default_rng(5), 4, 8)
    example.tensors["weight_format"] += 1
    with pytest.raises(UnsupportedQuantization, match="row by row"):
        decoded(example)
    del example.tensors["weight_format"]
    assert torch.equal(dequantize(decoded(example)), torch.from_numpy(example.values))


def test_four_bit_layer_is_rejected_as_eight_bit() -> None:
    with pytest.raises(ModelFileError, match=r"l\.weight is of type uint8, not int8"):
        decode("l", layer().tensors, BitsAndBytes(None))
