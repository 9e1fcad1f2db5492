"""Convert the bytes of a safetensors tensor to a torch tensor, and back."""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quant.errors import UnsupportedQuantization
from quant.safetensors import SafetensorsTensor
from quant.tensor import PlainTensor

TORCH_TYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
TYPE_NAMES = {dtype: name for name, dtype in TORCH_TYPES.items()}
PLAIN_TYPES = ("F32", "F16", "BF16")


def values(tensor: SafetensorsTensor, data: memoryview) -> Tensor:
    """Return `data`, exactly the tensor's bytes, as a tensor of its shape and type. Read-only data is copied.

    Raises UnsupportedQuantization for a type that is not in TORCH_TYPES.
    """
    if tensor.type.name not in TORCH_TYPES:
        raise _unsupported(tensor, tuple(TORCH_TYPES))
    dtype = TORCH_TYPES[tensor.type.name]
    if not math.prod(tensor.shape):
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.frombuffer(bytearray(data) if data.readonly else data, dtype=dtype).reshape(tensor.shape)


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the elements of `tensor` as a file stores them, row-major."""
    data: NDArray[np.uint8] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return data.data


def decode_plain(tensor: SafetensorsTensor, data: memoryview) -> PlainTensor:
    """Return the canonical form of a plain tensor. Raises UnsupportedQuantization for any other type."""
    if tensor.type.name not in PLAIN_TYPES:
        raise _unsupported(tensor, PLAIN_TYPES)
    return PlainTensor(tensor.shape, tensor.type.name, values(tensor, data))


def _unsupported(tensor: SafetensorsTensor, known: tuple[str, ...]) -> UnsupportedQuantization:
    return UnsupportedQuantization(
        f"The tensor {tensor.name} is stored as {tensor.type.name}, which is not supported here",
        f"Supported types: {', '.join(known)}.",
    )
