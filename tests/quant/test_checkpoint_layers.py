"""Properties of the layers of every checkpoint format: values, size, and rejection of hostile layers."""

import copy
import random
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quant.errors import ModelFileError
from quant.ggml_blocks import SLAB
from quant.kernels.reference import dequantize, dequantize_rows
from quant.linear import ReferenceBackend
from quant.tensor import GroupedTensor
from tests.quant.checkpoint_layers import (
    DECODERS,
    LAYER,
    Layer,
    awq_layer,
    decoded,
    eight_bit_layer,
    four_bit_layer,
    gptq_layer,
    pack_quantized_layer,
)

SEEDS = st.integers(0, 1 << 32).map(np.random.default_rng)
BITS = st.sampled_from([2, 4, 8])
FEW = st.integers(1, 5)


def groups(columns: int) -> st.SearchStrategy[int | None]:
    return st.one_of(st.none(), st.integers(1, columns), st.just(columns + 7))


def check(layer: Layer) -> GroupedTensor:
    """Check every value bit for bit, as a whole and row by row."""
    weight = decoded(layer)
    expected = torch.from_numpy(layer.values)
    assert weight.shape == expected.shape
    assert torch.equal(dequantize(weight), expected)
    index = torch.tensor([len(expected) - 1, 0, len(expected) // 2])
    assert torch.equal(dequantize_rows(weight, index), expected[index])
    return weight


@given(SEEDS, BITS, FEW, FEW, st.sampled_from([1, 2]), st.booleans(), st.data())
def test_gptq_layer_is_decoded_exactly(
    rng: np.random.Generator, bits: int, m: int, n: int, version: int, ordered: bool, data: st.DataObject
) -> None:
    rows, columns = m * 32 // bits, n * 32 // bits
    group = data.draw(groups(columns))
    check(gptq_layer(rng, rows, columns, group, bits, version=version, ordered=ordered))


@given(SEEDS, FEW, st.integers(1, 70), st.data())
def test_awq_layer_is_decoded_exactly(rng: np.random.Generator, m: int, columns: int, data: st.DataObject) -> None:
    check(awq_layer(rng, 8 * m, columns, data.draw(groups(columns))))


@given(SEEDS, BITS, st.integers(1, 20), st.integers(1, 70), st.booleans(), st.booleans(), st.data())
def test_pack_quantized_layer_is_decoded_exactly(
    rng: np.random.Generator, bits: int, rows: int, columns: int, symmetric: bool, ordered: bool, data: st.DataObject
) -> None:
    group = data.draw(groups(columns))
    ordered = ordered and group is not None
    check(pack_quantized_layer(rng, rows, columns, group, bits, symmetric=symmetric, ordered=ordered))


@given(SEEDS, st.sampled_from(["nf4", "fp4"]), st.integers(1, 20), FEW, st.sampled_from([1, 2, 7, 64]), st.booleans())
def test_four_bit_bitsandbytes_layer_is_decoded_exactly(
    rng: np.random.Generator, table: str, rows: int, n: int, block: int, nested: bool
) -> None:
    check(four_bit_layer(rng, rows, 2 * n * block, block, table, nested=nested))


@given(SEEDS, st.integers(1, 20), st.integers(1, 70))
def test_eight_bit_bitsandbytes_layer_is_decoded_exactly(rng: np.random.Generator, rows: int, columns: int) -> None:
    check(eight_bit_layer(rng, rows, columns))


def some_layers() -> dict[str, Layer]:
    rng = np.random.default_rng(7)
    return {
        "gptq": gptq_layer(rng, 64, 256, 64),
        "gptq, ordered": gptq_layer(rng, 64, 256, 64, 8, version=2, ordered=True),
        "gptq, whole rows": gptq_layer(rng, 64, 256, None, 2),
        "awq": awq_layer(rng, 64, 256, 64),
        "pack-quantized": pack_quantized_layer(rng, 64, 256, 64),
        "pack-quantized, asymmetric": pack_quantized_layer(rng, 33, 256, 64, 8, symmetric=False),
        "pack-quantized, ordered": pack_quantized_layer(rng, 64, 256, 64, 4, ordered=True),
        "pack-quantized, channel": pack_quantized_layer(rng, 64, 255, None, 4, symmetric=False),
        "nf4": four_bit_layer(rng, 64, 256, 64),
        "fp4, nested": four_bit_layer(rng, 64, 256, 64, "fp4", nested=True),
        "int8": eight_bit_layer(rng, 64, 256),
    }


LAYERS = some_layers()


@pytest.mark.parametrize("name", LAYERS)
def test_forward_equals_the_product_of_dequantized_weights(name: str) -> None:
    layer = ReferenceBackend(keep_dequantized=False).linear([decoded(LAYERS[name])])
    x = torch.randn(5, layer.inputs)
    values, exact = torch.from_numpy(LAYERS[name].values).double(), x.double()
    # bound of the rounding errors of a float32 sum, for any order of its terms
    bound = (layer.inputs + 4) * 2**-24 * (exact.abs() @ values.abs().T)
    assert ((layer.forward(x) - exact @ values.T).abs() <= bound).all()
    ids = torch.tensor([3, 0, 3])
    assert torch.equal(layer.rows(ids), torch.from_numpy(LAYERS[name].values)[ids])


LARGE: dict[str, Callable[[np.random.Generator], Layer]] = {
    "gptq": lambda rng: gptq_layer(rng, 256, 2048, 128),
    "gptq, ordered": lambda rng: gptq_layer(rng, 256, 2048, 128, ordered=True),
    "awq": lambda rng: awq_layer(rng, 256, 2048, 128),
    "pack-quantized": lambda rng: pack_quantized_layer(rng, 256, 2048, 128),
    "pack-quantized, channel": lambda rng: pack_quantized_layer(rng, 256, 2048, None, symmetric=False),
    "nf4, nested": lambda rng: four_bit_layer(rng, 256, 2048, 64, nested=True),
    "int8": lambda rng: eight_bit_layer(rng, 256, 2048),
}


@pytest.mark.parametrize("name", LARGE)
def test_canonical_form_is_no_larger_than_the_file(name: str) -> None:
    layer = LARGE[name](np.random.default_rng(3))
    assert decoded(layer).nbytes <= 1.03 * layer.stored


WIDE = 2048


def zeros(kind: torch.dtype, *shapes: tuple[str, tuple[int, ...]]) -> dict[str, Tensor]:
    return {name: torch.zeros(shape, dtype=kind) for name, shape in shapes}


WIDE_LAYERS: dict[str, dict[str, Tensor]] = {
    "gptq": zeros(torch.int32, ("qweight", (WIDE // 8, WIDE)), ("qzeros", (4, WIDE // 8)))
    | zeros(torch.float16, ("scales", (4, WIDE))),
    "awq": zeros(torch.int32, ("qweight", (WIDE, WIDE // 8)), ("qzeros", (4, WIDE // 8)))
    | zeros(torch.float16, ("scales", (4, WIDE))),
    "compressed-tensors": zeros(torch.int32, ("weight_packed", (WIDE, WIDE // 8)))
    | {"weight_scale": torch.zeros(WIDE, 4).half(), "weight_shape": torch.tensor([WIDE, WIDE])},
    "bitsandbytes": zeros(torch.int8, ("weight", (WIDE, WIDE))) | zeros(torch.float32, ("SCB", (WIDE,))),
}
WIDE_CONFIGS: dict[str, dict[str, object]] = {
    "gptq": LAYERS["gptq"].config | {"group_size": WIDE // 4},
    "awq": LAYERS["awq"].config | {"group_size": WIDE // 4},
    "compressed-tensors": pack_quantized_layer(np.random.default_rng(0), 8, WIDE, WIDE // 4).config,
    "bitsandbytes": LAYERS["int8"].config,
}


@pytest.mark.parametrize("method", DECODERS)
def test_decoding_memory_does_not_grow_with_the_weight(method: str) -> None:
    tracemalloc.start()
    try:
        weight = DECODERS[method](WIDE_LAYERS[method], WIDE_CONFIGS[method])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert weight.shape == (WIDE, WIDE)
    assert peak < weight.codes.nbytes + 8 * SLAB


@pytest.mark.parametrize("name", LAYERS)
def test_decoded_weight_is_a_copy(name: str) -> None:
    layer = copy.deepcopy(LAYERS[name])
    weight = decoded(layer)
    for tensor in layer.tensors.values():
        tensor.zero_()
    assert torch.equal(dequantize(weight), torch.from_numpy(layer.values))


# -- hostile layers

TYPES = (torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.bool)
ODD_VALUES: list[object] = [
    None, True, False, -2, -1, 0, 1, 3, 5, 7, 2**31, 2**70, 0.5, float("nan"), float("inf"), "", "x" * 500, "gptq",
    "re:(a*)*", [], [1], [None], {}, {"a": {}}, ["Linear"],
]  # fmt: skip


def change_tensor(tensors: dict[str, Tensor], rng: random.Random) -> None:
    name = rng.choice(sorted(tensors))
    tensor = tensors[name].clone(memory_format=torch.contiguous_format)
    match rng.randrange(9):
        case 0:
            del tensors[name]
        case 1:
            tensors[rng.choice(["bias", "weight", "g_idx", "weight_g_idx", "qweight2"])] = tensor
        case 2:
            tensors[name] = tensor.to(rng.choice(TYPES))
        case 3 if tensor.ndim and tensor.numel():
            side = rng.randrange(tensor.ndim)
            tensors[name] = tensor.narrow(side, 0, rng.choice([0, 1, tensor.shape[side] - 1]))
        case 4 if tensor.ndim and tensor.numel():
            side = rng.randrange(tensor.ndim)
            tensors[name] = torch.cat([tensor, tensor.narrow(side, 0, 1)], dim=side)
        case 5:
            tensors[name] = rng.choice(
                [tensor.T if tensor.ndim == 2 else tensor, tensor.flatten(), tensor.unsqueeze(0)]
            )
        case 6:
            tensors[name] = tensor.view(torch.uint8) if tensor.ndim else tensor
        case 7 if tensor.dtype == torch.uint8 and tensor.ndim == 1 and tensor.numel():  # text, such as a quant state
            data = bytearray(tensor.numpy().tobytes())
            at = rng.randrange(len(data))
            data[at : at + rng.randrange(3)] = rng.choice([b"", b"9", b"-", b"[", b"}", b"null", b"1e999", b"\xff"])
            tensors[name] = torch.tensor(list(data), dtype=torch.uint8)
        case _ if tensor.numel():
            changed = tensor.clone().flatten().contiguous()
            value = rng.choice([-1, 0, 1, 3, 255, 2**31 - 1, -(2**31), 2**62])
            # The low bytes of the value, for any type.
            bytes_of = value.to_bytes(16, "little", signed=True)[: changed.itemsize]
            at = rng.randrange(changed.numel())
            changed.view(torch.uint8)[at * changed.itemsize : (at + 1) * changed.itemsize] = torch.tensor(
                list(bytes_of)
            )
            tensors[name] = changed.view(tensor.shape)


def change_config(config: dict[str, object], rng: random.Random) -> None:
    """Replace or delete a random value of the configuration."""
    section, names = config, sorted(config)
    name = rng.choice(names)
    inner = section[name]
    while isinstance(inner, dict) and inner and rng.random() < 0.9:
        section, name = inner, rng.choice(sorted(inner))
        inner = section[name]
    if rng.random() < 0.2:
        del section[name]
    elif rng.random() < 0.2:
        section[rng.choice(["dynamic", "pack_dtype", "format", "version", "actorder"])] = rng.choice(ODD_VALUES)
    else:
        section[name] = rng.choice(ODD_VALUES)


@pytest.mark.parametrize("name", LAYERS)
def test_mutated_layer_is_decoded_or_rejected(name: str, mutations: int) -> None:
    rng = random.Random(name)
    method = str(LAYERS[name].config["quant_method"])
    refused = accepted = 0
    for _ in range(mutations // len(LAYERS)):
        tensors, config = dict(LAYERS[name].tensors), copy.deepcopy(LAYERS[name].config)
        for _ in range(rng.randint(1, 2)):
            if rng.random() < 0.3 and config:
                change_config(config, rng)
            elif tensors:
                change_tensor(tensors, rng)
        try:
            weight = DECODERS[method](tensors, config)
        except ModelFileError as error:
            assert len(error.message) < 400
            assert error.remedy
            assert LAYER in error.message or "quantization_config" in error.message
            refused += 1
        else:
            assert dequantize(weight).shape == weight.shape
            accepted += 1
    assert refused > 0
    assert accepted > 0
