"""Detect invalid memory accesses: `torch.empty` fills tensors with NaN or the largest integer, between two fences.

If a kernel reads uninitialized memory, its results are wrong. If it writes next to a tensor, the test fails at the end.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

FENCE = 128  # elements on either side; a multiple of the alignment that kernels rely on, for every type


class Fences:
    """Allocates each tensor in the middle of a larger one, and keeps the larger tensors for the check."""

    def __init__(self) -> None:
        self._allocate: Callable[..., Tensor] = torch.empty
        self._wholes: list[Tensor] = []

    def empty(self, *shape: Any, **options: Any) -> Tensor:
        sizes = shape if shape and isinstance(shape[0], int) else tuple(shape[0]) if shape else ()
        if torch.device(options.get("device") or "cpu").type == "meta" or "out" in options:
            return self._allocate(*shape, **options)
        count = math.prod(sizes)
        whole = self._allocate(count + 2 * FENCE, **options)
        self._wholes.append(whole)
        return whole[FENCE : FENCE + count].view(sizes)

    def empty_like(self, other: Tensor) -> Tensor:
        return self.empty(*other.shape, dtype=other.dtype, device=other.device)

    def check(self) -> None:
        """Check that no fence was overwritten."""
        for whole in self._wholes:
            for fence in (whole[:FENCE], whole[-FENCE:]):
                untouched = fence.isnan() if fence.is_floating_point() else fence == torch.iinfo(fence.dtype).max
                assert untouched.all(), f"a write outside of a tensor of {len(whole) - 2 * FENCE} elements"


@contextmanager
def fenced() -> Iterator[None]:
    fences, before = Fences(), torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(
        True, warn_only=True
    )  # torch then fills new tensors with NaN or the largest integer
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "empty", fences.empty)
            patch.setattr(torch, "empty_like", fences.empty_like)
            yield
        fences.check()
    finally:
        torch.use_deterministic_algorithms(before)
