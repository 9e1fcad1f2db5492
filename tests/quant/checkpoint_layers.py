"""Random layers of every checkpoint format with their expected values.

Layers are written by the definition of their layout, without the decoders' code: words are Python integers, and values
are computed column by column.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quant import awq, bitsandbytes, compressed_tensors, gptq
from quant.tensor import GroupedTensor

Array = NDArray[np.int64]
Floats = NDArray[np.float32]

LAYER = "model.layers.0.mlp.up_proj"
SCALE_TYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass
class Layer:
    tensors: dict[str, Tensor]
    config: dict[str, object]  # quantization_config of config.json
    values: Floats
    stored: int = 0  # bytes in the file

    def __post_init__(self) -> None:
        self.stored = sum(tensor.nbytes for tensor in self.tensors.values())


def words(values: Array, bits: int) -> Tensor:
    """Pack each row of integers as one long number, the first in its lowest bits, and divide it into int32 words [rows,
    n].
    """
    rows = []
    for row in values.tolist():
        number = sum(value << (bits * index) for index, value in enumerate(row))
        size = -(-len(row) * bits // 32)
        rows.append(np.frombuffer(number.to_bytes(4 * size, "little"), "<i4"))
    return torch.from_numpy(np.stack(rows).copy())


def scaled(codes: Array, zeros: Array, scales: Tensor, column_groups: Array) -> Floats:
    """Return the values for codes [rows, columns], and zeros and scales [rows, groups]."""
    out = np.empty(codes.shape, np.float32)
    whole = scales.float().numpy()
    for column, group in enumerate(column_groups):
        out[:, column] = whole[:, group] * (codes[:, column] - zeros[:, group]).astype(np.float32)
    return out


def random_scales(rng: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(rng.standard_normal(shape)).to(SCALE_TYPES[rng.integers(3)])


def column_groups(rng: np.random.Generator, columns: int, group: int | None, *, ordered: bool) -> Array:
    groups = np.arange(columns) // (group or columns)
    return rng.permutation(groups) if ordered else groups


def gptq_layer(
    rng: np.random.Generator,
    rows: int,
    columns: int,
    group: int | None,
    bits: int = 4,
    *,
    version: int = 1,
    ordered: bool = False,
) -> Layer:
    """Make a GPTQ layer. Zero points of version 1 are at least 1, because writers differ in how they store 0."""
    which = column_groups(rng, columns, group, ordered=ordered)
    groups = which.max() + 1
    codes = rng.integers(0, 1 << bits, (rows, columns))
    zeros = rng.integers(version == 1, 1 << bits, (rows, groups))
    scales = random_scales(rng, rows, groups)
    tensors = {
        "qweight": words(codes, bits).T.contiguous(),
        "qzeros": words(zeros.T - (version == 1), bits),
        "scales": scales.T.contiguous(),
        "g_idx": torch.from_numpy(which).int(),
    }
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group or -1,
        "desc_act": ordered,
        "sym": False,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }
    return Layer(tensors, config, scaled(codes, zeros, scales, which))


def awq_layer(rng: np.random.Generator, rows: int, columns: int, group: int | None) -> Layer:
    which = column_groups(rng, columns, group, ordered=False)
    groups = which.max() + 1
    codes, zeros = (rng.integers(0, 16, (rows, count)) for count in (columns, groups))
    scales = random_scales(rng, rows, groups)

    def interleaved(by_column: Array) -> Tensor:
        eights = by_column.reshape(len(by_column), -1, 8)
        return words(eights[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(len(by_column), -1), 4)

    tensors = {"qweight": interleaved(codes.T), "qzeros": interleaved(zeros.T), "scales": scales.T.contiguous()}
    config = {"quant_method": "awq", "bits": 4, "group_size": group or -1, "zero_point": True, "version": "gemm"}
    return Layer(tensors, config, scaled(codes, zeros, scales, which))


def pack_quantized_layer(
    rng: np.random.Generator,
    rows: int,
    columns: int,
    group: int | None,
    bits: int = 4,
    *,
    symmetric: bool = True,
    ordered: bool = False,
) -> Layer:
    half = 1 << (bits - 1)
    which = column_groups(rng, columns, group, ordered=ordered)
    groups = which.max() + 1
    codes = rng.integers(-half, half, (rows, columns))
    zeros = np.zeros((rows, groups), np.int64) if symmetric else rng.integers(-half, half, (rows, groups))
    scales = random_scales(rng, rows, groups)
    tensors = {
        "weight_packed": words(codes + half, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor([rows, columns]),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words(zeros.T + half, bits).T.contiguous()
    if ordered:
        tensors["weight_g_idx"] = torch.from_numpy(which).int()
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group" if group else "channel",
        "group_size": group,
        "actorder": "group" if ordered else None,
        "dynamic": False,
        "observer": "minmax",
    }
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    config: dict[str, object] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }
    return Layer(tensors, config, scaled(codes, zeros, scales, which))


NUMBERS = {
    "nf4": bitsandbytes.NF4,
    "fp4": tuple(sign * n / 12 for sign in (1, -1) for n in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)),
}


def four_bit_layer(
    rng: np.random.Generator,
    rows: int,
    columns: int,
    block: int,
    table: str = "nf4",
    *,
    nested: bool = False,
    block_size: int = 24,
) -> Layer:
    numbers = np.array(NUMBERS[table], np.float32)
    codes = rng.integers(0, 16, rows * columns)
    blocks = rows * columns // block
    state: dict[str, object] = {"quant_type": table, "blocksize": block, "dtype": "float16", "shape": [rows, columns]}
    tensors = {
        "weight": torch.from_numpy(codes[0::2] << 4 | codes[1::2]).to(torch.uint8).unsqueeze(1),
        "weight.quant_map": torch.from_numpy(numbers.copy()),
    }
    if nested:
        offset = np.float32(0.047)
        parts = rng.integers(0, 256, blocks)
        nested_map = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
        nested_absmax = rng.uniform(0.1, 2, -(-blocks // block_size)).astype(np.float32)
        scales = np.array([nested_map[part] * nested_absmax[i // block_size] for i, part in enumerate(parts)]) + offset
        tensors["weight.absmax"] = torch.from_numpy(parts).to(torch.uint8)
        tensors["weight.nested_absmax"] = torch.from_numpy(nested_absmax)
        tensors["weight.nested_quant_map"] = torch.from_numpy(nested_map)
        state |= {"nested_blocksize": block_size, "nested_dtype": "float32", "nested_offset": float(offset)}
    else:
        scales = rng.uniform(0.1, 2, blocks).astype(np.float32)
        tensors["weight.absmax"] = torch.from_numpy(scales)
    data = np.frombuffer(json.dumps(state).encode(), np.uint8).copy()
    tensors[f"weight.quant_state.bitsandbytes__{table}"] = torch.from_numpy(data)
    config = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": table,
        "bnb_4bit_use_double_quant": nested,
    }
    values = np.array([scales[i // block] * numbers[code] for i, code in enumerate(codes)], np.float32)
    return Layer(tensors, config, values.reshape(rows, columns))


def eight_bit_layer(rng: np.random.Generator, rows: int, columns: int) -> Layer:
    codes = rng.integers(-128, 128, (rows, columns)).astype(np.int8)
    scb = rng.uniform(0.1, 2, rows).astype(np.float32)
    tensors = {
        "weight": torch.from_numpy(codes),
        "SCB": torch.from_numpy(scb),
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}
    return Layer(tensors, config, (scb * np.float32(1 / 127))[:, None] * codes.astype(np.float32))


Decoder = Callable[[Mapping[str, Tensor], object], GroupedTensor]
DECODERS: dict[str, Decoder] = {
    "gptq": lambda tensors, config: gptq.decode(LAYER, tensors, gptq.GPTQ.read(config)),
    "awq": lambda tensors, config: awq.decode(LAYER, tensors, awq.AWQ.read(config)),
    "compressed-tensors": lambda tensors, config: compressed_tensors.decode(
        LAYER, tensors, compressed_tensors.PackQuantized.read(config, LAYER)
    ),
    "bitsandbytes": lambda tensors, config: bitsandbytes.decode(LAYER, tensors, bitsandbytes.BitsAndBytes.read(config)),
}


def decoded(layer: Layer) -> GroupedTensor:
    return DECODERS[str(layer.config["quant_method"])](layer.tensors, layer.config)
