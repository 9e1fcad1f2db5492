"""Every wrapper of a kernel, called as the engine calls it, on tensors without memory.

A new wrapper gets a function here and a row in `CALLS`. A kernel that nobody launches fails the gate.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.kernels.gate import gated
from quant.kernels.card import Card


@dataclass(frozen=True, slots=True)
class Setting:
    """What a step is like."""

    card: Card
    model: ModelConfig
    tokens: int
    deterministic: bool


def blank(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _gate(setting: Setting) -> None:
    gated(blank(setting.tokens, 2 * setting.model.mlp_hidden), setting.model.gate)


CALLS: tuple[Callable[[Setting], None], ...] = (_gate,)
