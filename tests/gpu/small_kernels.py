"""Norms, the gate, and heads with their cache: traffic against that of a copy."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from engine.config import BLOCK_SIZE, ModelConfig
from engine.kernels.gate import gated
from engine.kernels.norms import rms_norm
from engine.kernels.rope_store import rope_and_store
from engine.operations import Attention, HeadNorms
from engine.rope import RotaryTable
from tests.gpu.figures import Figure, fraction
from tests.gpu.machine import Machine
from tests.kernels.shapes import LLAMA_8B, QWEN_32B, TINY

Run = Callable[[], object]


def figures(machine: Machine) -> Iterator[Figure]:
    for name, model in _models(machine).items():
        for tokens in (1, 32, 2048) if not machine.dry else (2,):
            for kernel, make in KERNELS.items():
                nbytes, run = make(machine, model, tokens)
                rate = nbytes / machine.seconds([run])
                yield Figure(
                    f"{kernel}, {name}, {tokens} tokens", rate / 1e9, "GB/s", fraction(rate, machine.peaks.copy), "copy"
                )


def _models(machine: Machine) -> dict[str, ModelConfig]:
    return {"tiny": TINY} if machine.dry else {"8B": LLAMA_8B, "32B": QWEN_32B}


def _norm(machine: Machine, model: ModelConfig, tokens: int) -> tuple[int, Run]:
    x, weight = (torch.randn(*shape, model.hidden, device=machine.device) for shape in ((tokens,), ()))
    return 6 * x.numel(), lambda: rms_norm(x, weight, model.norm_epsilon)


def _gate(machine: Machine, model: ModelConfig, tokens: int) -> tuple[int, Run]:
    x = torch.randn(tokens, 2 * model.mlp_hidden, device=machine.device).bfloat16()
    return 3 * x.numel(), lambda: gated(x, model.gate)


def _heads(machine: Machine, model: ModelConfig, tokens: int) -> tuple[int, Run]:
    heads, kv_heads, head_dim = model.heads, model.kv_heads, model.head_dim
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, device=machine.device).bfloat16()
    blocks = 1 + -(-tokens // BLOCK_SIZE)
    pool = torch.empty(blocks, 2, kv_heads, BLOCK_SIZE, head_dim, dtype=torch.bfloat16, device=machine.device)
    places = torch.arange(tokens, device=machine.device)
    attention = Attention(1.0, _rotary(machine, model, tokens), _norms(machine, model))

    def run() -> Tensor:
        sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
        return rope_and_store(qkv, places, places + BLOCK_SIZE, pool, **sizes, attention=attention)

    return 4 * qkv.numel(), run


def _rotary(machine: Machine, model: ModelConfig, positions: int) -> RotaryTable:
    cos, sin = torch.randn(2, positions, model.head_dim // 2, device=machine.device)
    return RotaryTable(cos, sin, model.ropes[0].interleaved)


def _norms(machine: Machine, model: ModelConfig) -> HeadNorms | None:
    weight = torch.ones(model.head_dim, device=machine.device)
    return HeadNorms(weight, weight, model.norm_epsilon) if model.head_norm else None


KERNELS: dict[str, Callable[[Machine, ModelConfig, int], tuple[int, Run]]] = {
    "norm": _norm,
    "gate": _gate,
    "rope and store": _heads,
}
