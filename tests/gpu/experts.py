"""Measure the mixture of experts of one layer of Qwen3 30B A3B: few tokens against memory bandwidth, many against the
matrix units.

The floor of few tokens is reading the experts that they use once. Calls take turns with experts, so that the cache does
not have them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from engine.kernels.activations import gated
from engine.kernels.expert_sum import expert_sum
from engine.kernels.routing import route
from engine.model_config import ExpertConfig, Gate, ModelConfig, Routing
from quant.cuda.backend import CudaBackend
from quant.cuda.experts import ExpertStack, tiles_of_experts
from quant.kernels.integer_rows import IntegerRows, integer_gated
from tests.gpu.figures import Figure, fraction
from tests.gpu.machine import Machine
from tests.kernels.shapes import QWEN_30B_A3B, TINY_EXPERTS
from tests.kernels.weights import weight

FEW, MANY = (1, 2, 4, 8, 16, 32), (128, 512, 2048, 4096)  # tokens
KINDS = (("Q4_K", "Q4_K"), ("Q4_K", "Q6_K"), ("MXFP4", "MXFP4"), ("e4m3 channel", "e4m3 channel"), ("BF16", "BF16"))
DRY_KINDS = (("Q4_0", "Q4_0"),)
LEAST_OF_COPY = 0.55  # of one token
LEAST_OF_PEAK = 0.35  # of 4096 tokens
TURNS = 16


@dataclass(frozen=True)
class Layer:
    """The experts of a layer on a GPU."""

    gate_up: ExpertStack
    down: ExpertStack
    routing: Routing

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, stream: Tensor) -> Tensor:
        tiles = tiles_of_experts(ids, (self.gate_up, self.down))
        inner: Tensor | IntegerRows | None = self.gate_up.multiply_gated(x, tiles, "silu")
        if inner is None:
            both = self.gate_up.multiply(x, tiles)
            inner = integer_gated(both, "silu") if self.down.takes_integers(tiles) else gated(both, Gate.SILU)
        outputs = self.down.multiply(inner, tiles, torch.float32)
        return expert_sum(outputs, weights, add_to=stream)

    @property
    def expert_bytes(self) -> float:
        stacks = self.gate_up, self.down
        return sum(matrix.nbytes for stack in stacks for matrix in stack.matrices) / self.routing.experts


def figures(machine: Machine) -> Iterator[Figure]:
    model = TINY_EXPERTS if machine.dry else QWEN_30B_A3B
    experts = model.layers[0].mlp
    assert isinstance(experts, ExpertConfig)
    yield from _routers(machine, experts.routing)
    for kinds in DRY_KINDS if machine.dry else KINDS:
        layer = _layer(machine, model, experts, kinds)
        name = f"experts, {'/'.join(dict.fromkeys(kinds))}"
        for tokens in (1, 8) if machine.dry else FEW + MANY:
            yield _figure(machine, name, model, experts, layer, tokens)


def _layer(machine: Machine, model: ModelConfig, experts: ExpertConfig, kinds: tuple[str, str]) -> Layer:
    integers = machine.card.prefers_integers
    backend = CudaBackend(machine.device, machine.card, deterministic=False, integer_prompts=integers)
    count = experts.routing.experts
    shapes = ((2 * experts.hidden, model.hidden), (model.hidden, experts.hidden))
    stacks = [
        backend.stack(([weight(kind, *shape, machine.device)] for _ in range(count)), count)
        for kind, shape in zip(kinds, shapes, strict=True)
    ]
    return Layer(stacks[0], stacks[1], experts.routing)


def _figure(
    machine: Machine, name: str, model: ModelConfig, experts: ExpertConfig, layer: Layer, tokens: int
) -> Figure:
    routing, few = experts.routing, tokens <= FEW[-1]
    turns = machine.scaled(TURNS if few else 2, 1)
    logits = torch.randn(turns, tokens, routing.experts, device=machine.device)
    routes = [route(it, routing)[:2] for it in logits]
    x = torch.randn(tokens, model.hidden, device=machine.device).bfloat16()
    stream = torch.zeros(tokens, model.hidden, device=machine.device)
    seconds = machine.seconds([partial(layer, x, ids, weights, stream) for ids, weights in routes])
    title = f"{name}, {tokens} tokens"
    if few:
        used = sum(len(set(ids.flatten().tolist())) for ids, _ in routes) / turns
        rate = used * layer.expert_bytes / seconds
        least = LEAST_OF_COPY if tokens == 1 else None
        return Figure(title, rate / 1e9, "GB/s", fraction(rate, machine.peaks.copy), "copy", least)
    rate = 6 * tokens * routing.active * experts.hidden * model.hidden / seconds
    least = LEAST_OF_PEAK if tokens == MANY[-1] and name.endswith("Q4_K") else None
    return Figure(title, rate / 1e12, "TFLOP/s", fraction(rate, machine.peaks.bfloat16), "bf16 peak", least)


def _routers(machine: Machine, routing: Routing) -> Iterator[Figure]:
    for tokens in (1, machine.scaled(4096, 4)):
        logits = torch.randn(tokens, routing.experts, device=machine.device)
        seconds = machine.seconds([partial(route, logits, routing)])
        yield Figure(f"choice of experts, {tokens} tokens", 1e3 * seconds, "ms")
