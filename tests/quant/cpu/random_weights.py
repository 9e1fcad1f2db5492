"""Random matrices of every type that has tiles, as a file holds them: quantized by the `gguf` package, or any bits."""

import gguf
import numpy as np
import torch

from quant.ggml_blocks import decode
from quant.ggml_types import GGML_TYPES
from quant.tensor import QTensor

KINDS = {kind.name: kind for kind in GGML_TYPES.values()}
QUANTIZED = ("Q4_0", "Q4_1", "Q8_0")
PLAIN = ("F16", "BF16", "F32")
TYPES = (*QUANTIZED, *PLAIN)


def random_weight(name: str, rows: int, columns: int, rng: np.random.Generator) -> QTensor:
    """Normally distributed values, quantized."""
    values = rng.standard_normal((rows, columns), np.float32)
    raw = gguf.quantize(values, gguf.GGMLQuantizationType[name])
    return decode(KINDS[name], memoryview(raw.tobytes()), (rows, columns))


def any_weight(name: str, rows: int, columns: int, rng: np.random.Generator) -> QTensor:
    """What random bytes say, infinities and NaN among the scales included."""
    raw = rng.integers(0, 256, (rows, KINDS[name].nbytes(columns)), np.uint8)
    return decode(KINDS[name], memoryview(raw.tobytes()), (rows, columns))


def bits(values: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: equal only where every bit is."""
    return values.contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32}[values.itemsize])
