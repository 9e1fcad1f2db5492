"""Measure the gated delta rules of hybrid models: decode and prompts, relative to their memory traffic."""

from collections.abc import Callable, Iterator

import torch

from engine.kernels.delta_rule import gated_delta_rule
from engine.mixer_config import DeltaConfig
from engine.operations import DeltaRule, Norm
from tests.gpu.figures import Figure, fraction
from tests.gpu.machine import Machine
from tests.kernels.shapes import DELTA_27B, DELTA_35B_A3B, TINY_DELTA

MODELS = {"27B": DELTA_27B, "35B-A3B": DELTA_35B_A3B}


def figures(machine: Machine) -> Iterator[Figure]:
    for name, shape in {"tiny": TINY_DELTA}.items() if machine.dry else MODELS.items():
        for requests in (1, 32) if not machine.dry else (2,):
            yield _figure(machine, f"decode, {name}, {requests} requests", shape, requests, 1, chunked=True)
        tokens = machine.scaled(2048, 20)
        yield _figure(machine, f"prompt, {name}, {tokens} tokens", shape, 1, tokens, chunked=True)
        yield _figure(machine, f"prompt, {name}, {tokens} tokens one by one", shape, 1, tokens, chunked=False)


def _figure(machine: Machine, name: str, shape: DeltaConfig, requests: int, tokens: int, *, chunked: bool) -> Figure:
    """Measure a step of `tokens` tokens of each request. The traffic is that of rows, outputs, and states."""
    states = 8 * requests * shape.cache.elements  # each is read and written
    nbytes = states + requests * tokens * (4 * shape.in_width + 2 * shape.width)
    calls = [_call(machine, shape, requests, tokens, chunked=chunked) for _ in range(machine.copies(nbytes))]
    rate = nbytes / machine.seconds(calls)
    return Figure(name, rate / 1e9, "GB/s", fraction(rate, machine.peaks.copy), "copy")


def _call(machine: Machine, shape: DeltaConfig, requests: int, tokens: int, *, chunked: bool) -> Callable[[], object]:
    device = machine.device
    pool = torch.zeros(1 + 2 * requests, shape.cache.elements, device=device)
    rows = torch.randn(requests * tokens, shape.in_width, device=device)
    tables = torch.arange(1, 1 + 2 * requests, dtype=torch.int32, device=device).view(requests, 2)
    starts = torch.arange(0, requests * tokens + 1, tokens, dtype=torch.int32, device=device)
    contexts = torch.full((requests,), tokens, dtype=torch.int32, device=device)
    conv, norm = (torch.randn(*it, device=device) for it in ((shape.taps, shape.conv_width), (shape.value_dim,)))
    bias, rate = torch.randn(2, shape.value_heads, device=device)
    delta = DeltaRule(shape, conv, -rate.abs(), bias, Norm(norm, 1e-6))
    return lambda: gated_delta_rule(rows, pool, tables, starts, contexts, delta, chunked=chunked)
