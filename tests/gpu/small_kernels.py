"""Measure norms, gates, rope with the KV store, and sampling: memory traffic relative to a copy."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from engine.config import BLOCK_SIZE
from engine.kernels.activations import gated
from engine.kernels.chunk_passes import find_maxima
from engine.kernels.norms import normalize
from engine.kernels.rope_store import rope_and_store
from engine.kernels.sampling import draw_tokens
from engine.kernels.sampling_rows import SampleTarget, build_rows
from engine.kernels.step_logits import StepLogits
from engine.model_config import ModelConfig
from engine.operations import Attention, HeadNorms, Norm
from engine.request import Request
from engine.rope import RotaryTable
from engine.sampling.masks import NO_MASKS
from engine.sampling_params import SamplingParams
from tests.gpu.figures import Figure, fraction
from tests.gpu.machine import Machine
from tests.kernels.shapes import LLAMA_8B, QWEN_32B, TINY, mixer_of

Run = Callable[[], object]
MANY = 2048  # tokens of a prompt, of which one is sampled


def figures(machine: Machine) -> Iterator[Figure]:
    for name, model in _models(machine).items():
        for tokens in (1, 32, MANY) if not machine.dry else (2,):
            for kernel, make in (KERNELS if tokens == MANY else KERNELS | SAMPLERS).items():
                nbytes, run = make(machine, model, tokens)
                rate = nbytes / machine.seconds([run])
                yield Figure(
                    f"{kernel}, {name}, {tokens} tokens", rate / 1e9, "GB/s", fraction(rate, machine.peaks.copy), "copy"
                )


def _models(machine: Machine) -> dict[str, ModelConfig]:
    return {"tiny": TINY} if machine.dry else {"8B": LLAMA_8B, "32B": QWEN_32B}


def _norm(machine: Machine, model: ModelConfig, tokens: int) -> tuple[int, Run]:
    x, weight = (torch.randn(*shape, model.hidden, device=machine.device) for shape in ((tokens,), ()))
    norm = Norm(weight, model.norm.epsilon)
    return 6 * x.numel(), lambda: normalize(x, norm)


def _gate(machine: Machine, model: ModelConfig, tokens: int) -> tuple[int, Run]:
    (width,) = model.mlp_widths
    x = torch.randn(tokens, 2 * width, device=machine.device).bfloat16()
    return 3 * x.numel(), lambda: gated(x, model.gate)


def _heads(machine: Machine, model: ModelConfig, tokens: int) -> tuple[int, Run]:
    mixer = mixer_of(model)
    heads, kv_heads, head_dim = mixer.heads, mixer.kv_heads, mixer.head_dim
    qkv = torch.randn(tokens, mixer.qkv_width, device=machine.device).bfloat16()
    blocks = 1 + -(-tokens // BLOCK_SIZE)
    pool = torch.empty(blocks, 2, kv_heads, BLOCK_SIZE, head_dim, dtype=torch.bfloat16, device=machine.device)
    positions = torch.arange(tokens, device=machine.device)
    attention = Attention(1.0, _rotary(machine, model, tokens), _norms(machine, model))

    def run() -> Tensor:
        return rope_and_store(
            qkv, positions, positions + BLOCK_SIZE, pool, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
            attention=attention, early=machine.card.starts_early,
        )  # fmt: skip

    return 4 * qkv.numel(), run


def _greedy(machine: Machine, model: ModelConfig, tokens: int) -> tuple[int, Run]:
    values = torch.randn(tokens, model.vocab_size, device=machine.device)
    return values.nbytes, lambda: StepLogits.of(values)


def _draw(machine: Machine, model: ModelConfig, tokens: int) -> tuple[int, Run]:
    """Return the bytes of one read of the logits, and a call that samples a token from each row."""
    params = SamplingParams(temperature=0.8, top_k=40, top_p=0.95)
    logits = StepLogits.over(torch.randn(tokens, model.vocab_size, device=machine.device))
    targets = [SampleTarget(row, Request(row, (1,), params), 0) for row in range(tokens)]
    draws = build_rows(targets, model.vocab_size, NO_MASKS).to(machine.device).columns.draws

    def run() -> None:
        find_maxima(logits.values, logits.maxima)
        draw_tokens(logits, draws, logits.tokens)

    return logits.values.nbytes, run


def _rotary(machine: Machine, model: ModelConfig, positions: int) -> RotaryTable:
    cos, sin = torch.randn(2, positions, mixer_of(model).head_dim // 2, device=machine.device)
    return RotaryTable(cos, sin, model.ropes[0].interleaved)


def _norms(machine: Machine, model: ModelConfig) -> HeadNorms | None:
    norm = Norm(torch.ones(mixer_of(model).head_dim, device=machine.device), model.norm.epsilon)
    return HeadNorms(norm, norm) if model.head_norm else None


Make = Callable[[Machine, ModelConfig, int], tuple[int, Run]]
KERNELS: dict[str, Make] = {
    "norm": _norm,
    "gate": _gate,
    "rope and store": _heads,
}
SAMPLERS: dict[str, Make] = {"greedy": _greedy, "draw": _draw}
