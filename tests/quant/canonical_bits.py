"""Comparison of two canonical tensors, bit by bit, in every field."""

from dataclasses import fields, is_dataclass

import torch
from torch import Tensor


def same(left: object, right: object) -> bool:
    if isinstance(left, Tensor):
        return (
            isinstance(right, Tensor)
            and left.dtype == right.dtype
            and left.shape == right.shape
            and torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))
        )
    if isinstance(left, tuple):
        return isinstance(right, tuple) and len(left) == len(right) and all(map(same, left, right))
    if is_dataclass(left):
        return type(left) is type(right) and all(
            same(getattr(left, f.name), getattr(right, f.name)) for f in fields(left)
        )
    return left == right
