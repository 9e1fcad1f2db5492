import numpy as np
import pytest
import torch

from quant.compressed_tensors import PackQuantized, decode
from quant.errors import ModelFileError, UnsupportedQuantization
from quant.kernels.reference import dequantize
from tests.quant.checkpoint_layers import decoded, pack_quantized_layer

Config = dict[str, object]


def scheme(*targets: str, **weights: object) -> Config:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128} | weights
    return {"targets": list(targets), "weights": weights}


def config(*schemes: Config, **more: object) -> Config:
    groups = {f"group_{number}": each for number, each in enumerate(schemes)}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups} | more


def test_hand_made_word_is_decoded() -> None:
    tensors = {
        "weight_packed": torch.tensor([[0x76543210], [0x08FEDCBA]], dtype=torch.int32),
        "weight_scale": torch.tensor([[2.0], [1.0]], dtype=torch.bfloat16),
        "weight_shape": torch.tensor([2, 7]),
    }
    weight = decode("l", tensors, PackQuantized(4, None, symmetric=True, ordered=False))
    assert dequantize(weight).tolist() == [[-16, -14, -12, -10, -8, -6, -4], [2, 3, 4, 5, 6, 7, 0]]


def test_zero_points_are_packed_along_rows() -> None:
    tensors = {
        "weight_packed": torch.full((3, 1), 0x00000088, dtype=torch.int32),
        "weight_scale": torch.ones(3, 2),
        "weight_shape": torch.tensor([3, 2]),
        "weight_zero_point": torch.tensor([[0x987, 0x888]], dtype=torch.int32),
    }
    weight = decode("l", tensors, PackQuantized(4, 1, symmetric=False, ordered=False))
    assert dequantize(weight).tolist() == [[1, 0], [0, 0], [-1, 0]]


def test_g_idx_of_minus_one_means_columns_in_order() -> None:
    layer = pack_quantized_layer(np.random.default_rng(2), 8, 64, 16)
    assert isinstance(layer.config["config_groups"], dict)
    layer.config["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    layer.tensors["weight_g_idx"] = torch.full((64,), -1, dtype=torch.int32)
    assert torch.equal(dequantize(decoded(layer)), torch.from_numpy(layer.values))
    layer.tensors["weight_g_idx"][5] = 0
    with pytest.raises(ModelFileError, match="weight_g_idx refers to group -1"):
        decoded(layer)


def test_quantization_config_is_read() -> None:
    assert PackQuantized.read(config(scheme("Linear")), "l") == PackQuantized(4, 128, True, False)
    channel = scheme("Linear", num_bits=8, strategy="channel", group_size=None, symmetric=False, actorder="static")
    assert PackQuantized.read(config(channel), "l") == PackQuantized(8, None, False, False)
    ordered = scheme("Linear", actorder="group")
    assert PackQuantized.read(config(ordered, transform_config={}, sparsity_config={}), "l").ordered


def test_scheme_naming_the_layer_takes_precedence() -> None:
    section = config(scheme("Linear"), scheme("a.down_proj", num_bits=8))
    assert PackQuantized.read(section, "a.down_proj").bits == 8
    assert PackQuantized.read(section, "a.up_proj").bits == 4


@pytest.mark.parametrize(
    "schemes",
    [
        [scheme("Linear"), scheme("re:.*down_proj", num_bits=8)],
        [scheme("Linear"), scheme("Linear", num_bits=8)],
        [scheme("Embedding"), scheme("Conv2d")],
        [],
    ],
)
def test_ambiguous_schemes_are_rejected(schemes: list[Config]) -> None:
    with pytest.raises(UnsupportedQuantization, match="quantization_config"):
        PackQuantized.read(config(*schemes), "l")


@pytest.mark.parametrize(
    ("section", "name"),
    [
        (config(scheme("Linear"), format="marlin-24"), "quantization_config.format"),
        (config(scheme("Linear") | {"format": "float-quantized"}), "config_groups.group_0.format"),
        (config(scheme("Linear", type="float")), "weights.type"),
        (config(scheme("Linear", num_bits=3)), "weights.num_bits"),
        (config(scheme("Linear", strategy="tensor")), "weights.strategy"),
        (config(scheme("Linear"), transform_config={"config_groups": {"R1": {}}}), "transform_config.config_groups"),
        (config(scheme("Linear"), sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config.format"),
    ],
)
def test_error_names_unsupported_values(section: Config, name: str) -> None:
    with pytest.raises(UnsupportedQuantization, match=name):
        PackQuantized.read(section, "l")


def test_long_names_are_shortened_in_messages() -> None:
    section = config(scheme("Linear", type="float"))
    section["config_groups"] = {"x" * 10_000: scheme("Linear", type="y" * 10_000)}
    with pytest.raises(UnsupportedQuantization) as caught:
        PackQuantized.read(section, "l")
    assert len(caught.value.message) < 300


@pytest.mark.parametrize("shape", [[0, 8], [8, -1], [1 << 62, 1 << 62]])
def test_impossible_shape_is_rejected(shape: list[int]) -> None:
    layer = pack_quantized_layer(np.random.default_rng(2), 8, 64, 16)
    layer.tensors["weight_shape"] = torch.tensor(shape)
    with pytest.raises(ModelFileError, match=r"up_proj\.weight_"):
        decoded(layer)
