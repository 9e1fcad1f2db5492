import numpy as np
import pytest
import torch

from quant.errors import ModelFileError, UnsupportedQuantization
from quant.gptq import GPTQ, decode
from quant.kernels.reference import dequantize
from quant.tensor import Integers
from tests.quant.checkpoint_layers import Layer, decoded, gptq_layer, words

CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": 128}


def layer(*, ordered: bool = False) -> Layer:
    return gptq_layer(np.random.default_rng(1), 16, 96, 32, ordered=ordered)


def test_hand_made_word_is_decoded() -> None:
    tensors = {
        "qweight": torch.full((1, 8), 0x76543210, dtype=torch.int32),
        "qzeros": torch.tensor([[0x65432107]], dtype=torch.int32),
        "scales": torch.full((1, 8), 0.5, dtype=torch.float16),
    }
    weight = decode("l", tensors, GPTQ.read(CONFIG | {"group_size": -1}))
    expected = [[0.5 * (code - zero) for code in range(8)] for zero in (8, 1, 2, 3, 4, 5, 6, 7)]
    assert dequantize(weight).tolist() == expected


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_version_one_zero_points_borrow_across_a_word(bits: int) -> None:
    rng = np.random.default_rng(bits)
    example = gptq_layer(rng, 64, 64, 32, bits, version=1)
    zeros = rng.integers(0, 1 << bits, (2, 64))
    zeros[:, ::3] = 0
    ones = sum(1 << shift for shift in range(0, 32, bits))
    example.tensors["qzeros"] = words(zeros, bits) - ones
    weight = decoded(example)
    assert isinstance(weight.zero, Integers)
    assert np.array_equal(weight.zero.values()[:, :2].numpy(), zeros.T)


def test_order_maps_columns_to_inputs() -> None:
    example = layer(ordered=True)
    weight = decoded(example)
    assert weight.order is not None
    whole = torch.from_numpy(example.values)
    in_order = type(weight)(
        weight.shape, weight.type_name, weight.group, weight.codes, weight.scale, weight.zero, weight.table
    )
    assert torch.equal(dequantize(in_order), whole[:, weight.order])


def test_sorted_columns_need_no_permutation() -> None:
    example = layer()
    assert decoded(example).order is None
    example.config["desc_act"] = True
    assert decoded(example).order is None


def test_without_desc_act_g_idx_may_be_missing_or_zero() -> None:
    example = layer()
    example.tensors["g_idx"].zero_()
    assert torch.equal(dequantize(decoded(example)), torch.from_numpy(example.values))
    del example.tensors["g_idx"]
    assert torch.equal(dequantize(decoded(example)), torch.from_numpy(example.values))


def test_order_without_desc_act_is_rejected() -> None:
    example = layer(ordered=True)
    example.config["desc_act"] = False
    with pytest.raises(ModelFileError, match=r"up_proj\.g_idx is not in order"):
        decoded(example)


def test_desc_act_without_g_idx_is_rejected() -> None:
    example = layer(ordered=True)
    del example.tensors["g_idx"]
    with pytest.raises(ModelFileError, match="g_idx is missing"):
        decoded(example)


@pytest.mark.parametrize(
    ("value", "problem"), [(3, "refers to group 3 of 3"), (-1, "refers to group -1"), (2, "into group")]
)
def test_impossible_groups_are_rejected(value: int, problem: str) -> None:
    example = layer(ordered=True)
    first = int((example.tensors["g_idx"] != 2).nonzero()[0])
    example.tensors["g_idx"][first] = value
    with pytest.raises(ModelFileError, match=problem):
        decoded(example)


def test_quantization_config_is_read() -> None:
    assert GPTQ.read(CONFIG) == GPTQ(4, 128, zeros_less_one=True, ordered=False)
    assert GPTQ.read(CONFIG | {"group_size": -1, "desc_act": True, "bits": 8}) == GPTQ(8, None, True, True)
    assert not GPTQ.read(CONFIG | {"checkpoint_format": "gptq_v2", "format": "gptq"}).zeros_less_one
    assert not GPTQ.read(CONFIG | {"format": "gptq_v2", "dynamic": {}, "pack_dtype": "int32"}).zeros_less_one


@pytest.mark.parametrize(
    "change",
    [
        {"bits": 3},
        {"checkpoint_format": "marlin"},
        {"pack_dtype": "int16"},
        {"dynamic": {"+:.*gate.*": {"bits": 8}}},
        {"is_marlin_format": True},
        {"quant_method": "awq"},
    ],
)
def test_error_names_unsupported_values(change: dict[str, object]) -> None:
    with pytest.raises(UnsupportedQuantization, match=f"quantization_config.{next(iter(change))}"):
        GPTQ.read(CONFIG | change)


@pytest.mark.parametrize(
    "change", [{"bits": "4"}, {"bits": True}, {"group_size": 0}, {"group_size": None}, {"desc_act": 1}, {"format": 4}]
)
def test_error_names_values_of_a_wrong_type(change: dict[str, object]) -> None:
    with pytest.raises(ModelFileError, match=f"quantization_config.{next(iter(change))} is") as caught:
        GPTQ.read(CONFIG | change)
    assert not isinstance(caught.value, UnsupportedQuantization)
