"""Columns of several dtypes in one buffer, so that one copy transfers all of them."""

from collections.abc import Iterable

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes; kernels use vector loads of this size
WIDEST = 8  # bytes of the largest dtype of a column


def extent(tensors: Iterable[Tensor]) -> int:
    """Return the size in bytes of a buffer that can hold `tensors`, see `views`."""
    return sum(_padded(it.nbytes) for it in tensors)


def views(buffer: Tensor, tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return consecutive views into `buffer`, uint8 [bytes], with the dtypes and shapes of `tensors`."""
    elements = buffer[: len(buffer) // WIDEST * WIDEST]
    wholes: dict[torch.dtype, Tensor] = {}  # one view of each dtype, because views take time
    found, start = [], 0
    for it in tensors:
        if it.dtype not in wholes:
            wholes[it.dtype] = elements.view(it.dtype)
        first = start // it.itemsize
        part = wholes[it.dtype][first : first + it.numel()]
        found.append(part if it.ndim == 1 else part.view(it.shape))
        start += _padded(it.nbytes)
    return found


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
