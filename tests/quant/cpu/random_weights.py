"""Random matrices of every type that has tiles, with realistic scales or random bits.

The types are those of GGUF files and of safetensors checkpoints (`tests.quant.cpu.random_group_weights`).
"""

import gguf
import numpy as np
import torch
from numpy.typing import NDArray

from quant.ggml_blocks import BLOCKS, PLAIN_TYPES, decode
from quant.ggml_types import ggml_types
from quant.tensor import BlockTensor, QTensor
from tests.quant.cpu.random_group_weights import GROUP_TYPES, ORDERED

KINDS = {kind.name: kind for kind in ggml_types().values()}
QUANTIZED = tuple(BLOCKS)
PLAIN = tuple(PLAIN_TYPES)
TYPES = (*QUANTIZED, *PLAIN)
CODED_GROUP_TYPES, FLOAT_GROUP_TYPES = (
    tuple(name for name in GROUP_TYPES if GROUP_TYPES[name].floats == it) for it in (False, True)
)
EVERY = (*TYPES, *GROUP_TYPES)
_CHECKPOINTS = {**GROUP_TYPES, **ORDERED}


def width(name: str, columns: int) -> int:
    """Round `columns` up to whole blocks of a type."""
    size = max(32, 0 if name in _CHECKPOINTS else KINDS[name].block_elements)
    return -(-columns // size) * size


def random_raw(name: str, rows: int, columns: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Return the bytes of a random weight: normal values for plain types; else random codes and sub-scales, with
    positive and negative block scales around 0.05.
    """
    if name in PLAIN_TYPES:
        values = rng.standard_normal((rows, columns), np.float32)
        quantized: NDArray[np.uint8] = gguf.quantize(values, gguf.GGMLQuantizationType[name]).view(np.uint8)
        return quantized
    kind, block = KINDS[name], BLOCKS[name]
    raw = rng.integers(0, 256, (rows, columns // kind.block_elements, kind.block_bytes), np.uint8)
    for field in (block.scale, block.minimum):
        if field is not None and field.exponent:
            raw[:, :, field.at] = rng.integers(120, 128, raw.shape[:2])
        elif field is not None:
            scales = (rng.standard_normal(raw.shape[:2]) * 0.05).astype(np.float16)
            raw[:, :, field.at : field.at + 2] = scales[..., None].view(np.uint8)
    return raw.reshape(rows, -1)


def random_weight(name: str, rows: int, columns: int, rng: np.random.Generator) -> QTensor:
    """Return a random weight of any type."""
    if name in _CHECKPOINTS:
        return _CHECKPOINTS[name].make(rows, columns, rng)
    return random_ggml_weight(name, rows, columns, rng)


def random_ggml_weight(name: str, rows: int, columns: int, rng: np.random.Generator) -> BlockTensor:
    """Return a random weight of a GGUF type."""
    raw = random_raw(name, rows, columns, rng)
    return decode(KINDS[name], memoryview(raw.tobytes()), (rows, columns))


def any_weight(name: str, rows: int, columns: int, rng: np.random.Generator) -> BlockTensor:
    """Return a weight of random bytes, with infinities and NaN among the scales."""
    raw = rng.integers(0, 256, (rows, KINDS[name].nbytes(columns)), np.uint8)
    return decode(KINDS[name], memoryview(raw.tobytes()), (rows, columns))


def bits(values: torch.Tensor) -> torch.Tensor:
    """Return the same memory as integers, so that a comparison compares every bit."""
    return values.contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32}[values.itemsize])
