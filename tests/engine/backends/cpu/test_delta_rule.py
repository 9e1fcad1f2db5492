"""Gated delta rules on the CPU, against the reference implementation, and against a loop in float64.

The long run is `pytest tests/engine/backends/cpu/test_delta_rule.py --requests 32768`, where a request is a token.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.backends.cpu.buffers import Activation
from engine.backends.cpu.operations import CpuOperations
from engine.batch import Batch
from engine.config import GroupConfig
from engine.kernels import reference
from engine.kv.cache import KVCache
from engine.mixer_config import DeltaConfig
from engine.operations import DeltaRule, Norm
from tests.engine.backends.cpu.recorded import (
    Recorded,
    advance,
    compute,
    compute_in_steps,
    layer,
    plain,
    record,
    sequence,
)
from tests.support.kv_groups import kv_group, state_group

TOKENS = 70
GROUPS = (GroupConfig(), GroupConfig(recurrent=True))
BLOCKS = 64
SHAPES = {
    "shared keys": DeltaConfig(2, 6, 32, 64, 4, tiled=False),
    "tiled": DeltaConfig(2, 6, 32, 64, 4, tiled=True),
    "several strips": DeltaConfig(1, 1, 64, 160, 3, tiled=False),
    "real size": DeltaConfig(1, 2, 128, 128, 4, tiled=True),
}

pytestmark = pytest.mark.usefixtures("plain_layouts")


def random_delta(shape: DeltaConfig) -> DeltaRule:
    """Return random weights with decays from nearly 0 to nearly 1."""
    rate, bias = -torch.exp(3 * torch.randn(shape.value_heads)), torch.randn(shape.value_heads)
    norm = Norm(torch.randn(shape.value_dim), 1e-6)
    return DeltaRule(shape, torch.randn(shape.taps, shape.conv_width) / 2, rate, bias, norm)


def recorded(code_cache: Path, rows: Tensor, delta: DeltaRule, threads: int = 2) -> Recorded:
    """Record the delta rule of layer 2, which shares its group with layer 1. A token's id is its row."""

    def forward(ops: CpuOperations, batch: Batch, kv: KVCache) -> Activation:
        return ops.delta_rule(ops.embed(batch, layer(ops, plain(rows))), batch, kv.state(2), delta)

    groups = (kv_group((0,), 1, 32), state_group((1, 2), delta.config.cache.elements))
    return record(code_cache, forward, groups=groups, tokens=TOKENS, context=max(320, len(rows)), threads=threads)


def expected(rows: Tensor, delta: DeltaRule) -> tuple[Tensor, Tensor]:
    """Return the outputs of one request, and the state after it."""
    pool, count = torch.zeros(2, delta.config.cache.elements), len(rows)
    tables, starts, contexts = (torch.tensor(it) for it in ([[0, 1]], [0, count], [count]))
    return reference.gated_delta_rule(rows, pool, tables, starts, contexts, delta), pool[1]


def inputs(shape: DeltaConfig, tokens: int = TOKENS) -> Tensor:
    """Return random rows, whose width is a multiple of 32 as the embedding requires. The last columns are not read."""
    return torch.randn(tokens, -(-shape.in_width // 32) * 32)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_any_division_into_steps_gives_the_same_bits(name: str, threads: int, plain_layouts: Path) -> None:
    shape = SHAPES[name]
    rows, delta = inputs(shape), random_delta(shape)
    it = recorded(plain_layouts, rows, delta, threads)
    outputs, state = expected(rows[:, : shape.in_width], delta)
    wanted: tuple[Tensor, Tensor] | None = None
    for cuts in ([TOKENS], [1] * 40 + [30], [1, 2, 3, 64], [33, 37]):
        request = sequence(1, range(TOKENS), range(1, 9), [5])
        found = compute_in_steps(it.step, request, cuts, vocab_size=TOKENS, num_blocks=BLOCKS, groups=GROUPS)
        here = found, it.kv.state(2).pool[5].clone()
        torch.testing.assert_close(here[0], outputs, rtol=2e-3, atol=2e-3)  # a float16 product is last
        torch.testing.assert_close(here[1], state, rtol=1e-4, atol=1e-5)
        wanted = wanted or here
        assert torch.equal(here[0], wanted[0])
        assert torch.equal(here[1], wanted[1])


def test_requests_in_one_step_do_not_affect_each_other(plain_layouts: Path) -> None:
    shape = SHAPES["tiled"]
    rows, delta = inputs(shape), random_delta(shape)
    it = recorded(plain_layouts, rows, delta)
    requests = [sequence(number, range(TOKENS), range(1, 9), [number]) for number in (1, 2, 3)]
    for step in range(7):
        parts = list(zip(requests, [1 + step, 3, 10 - step], strict=True))
        compute(it.step, advance(parts, vocab_size=TOKENS, num_blocks=BLOCKS, groups=GROUPS))
    for number, request in enumerate(requests, 1):
        state = expected(rows[: request.num_computed, : shape.in_width], delta)[1]
        torch.testing.assert_close(it.kv.state(2).pool[number], state, rtol=1e-4, atol=1e-5)
    assert not it.kv.state(2).pool[0].any()


def test_state_after_many_tokens_is_close_to_float64(requests: int, plain_layouts: Path) -> None:
    shape = DeltaConfig(1, 2, 128, 128, 4, tiled=True)
    tokens = max(2048, requests)
    rows, delta = inputs(shape, tokens), random_delta(shape)
    it = recorded(plain_layouts, rows, delta)
    request = sequence(1, range(tokens), [1] * -(-tokens // 16), [5])
    while request.num_computed < tokens:
        part = request, min(TOKENS, tokens - request.num_computed)
        it.step.fill(advance([part], vocab_size=tokens, num_blocks=BLOCKS, groups=GROUPS))
        it.step.workers.run(part[1])
    kept = (shape.taps - 1) * shape.conv_width
    state = it.kv.state(2).pool[5, kept:].view(shape.value_heads, shape.key_dim, -1).double()
    wanted = float64_state(rows, delta)
    assert ((state - wanted).norm() / wanted.norm()).item() < 1e-5


def float64_state(rows: Tensor, delta: DeltaRule) -> Tensor:
    """Return the matrices of the value heads after the rows, float64, for one key head."""
    shape, rows = delta.config, rows.double()
    mixed = F.pad(rows[:, : shape.conv_width], (0, 0, shape.taps - 1, 0))
    convolved = F.silu(sum((delta.conv[tap] * mixed[tap : tap + len(rows)] for tap in range(shape.taps)), Tensor([0])))
    logits = rows[:, shape.conv_width + shape.width : shape.in_width]
    steps, decays = logits[:, : shape.value_heads].sigmoid(), logits[:, shape.value_heads :]
    decays = torch.exp(delta.rate * F.softplus(decays + delta.time_bias))
    keys = F.normalize(convolved[:, shape.key_dim : 2 * shape.key_dim], dim=1)
    values = convolved[:, 2 * shape.key_dim :].view(len(rows), shape.value_heads, -1)
    state = torch.zeros(shape.value_heads, shape.key_dim, shape.value_dim, dtype=torch.float64)
    for k, v, step, decay in zip(keys, values, steps, decays, strict=True):
        state *= decay.view(-1, 1, 1)
        state += k.view(1, -1, 1) * ((v - k @ state) * step.unsqueeze(-1)).unsqueeze(1)
    return state
