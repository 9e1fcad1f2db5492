"""Gated delta rules on a GPU, against the reference implementation."""

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from engine.kernels import reference
from engine.kernels.delta_rule import gated_delta_rule
from engine.model_config import DeltaConfig
from engine.operations import DeltaRule, Norm

pytestmark = pytest.mark.usefixtures("fenced_memory")

BLOCKS = 8
SHAPES = {
    "shared keys": DeltaConfig(2, 4, 32, 64, 4, tiled=False),
    "tiled": DeltaConfig(2, 4, 32, 64, 4, tiled=True),
    "odd sizes": DeltaConfig(1, 3, 24, 40, 3, tiled=False),
}


def random_delta(shape: DeltaConfig) -> DeltaRule:
    norm = Norm(torch.randn(shape.value_dim), 1e-6)
    rate, conv = -torch.rand(shape.value_heads) * 4, torch.randn(shape.taps, shape.conv_width) / 2
    return DeltaRule(shape, conv, rate, torch.randn(shape.value_heads), norm)


def on(device: torch.device, delta: DeltaRule) -> DeltaRule:
    conv, rate, bias = (it.to(device) for it in (delta.conv, delta.rate, delta.time_bias))
    norm = replace(delta.norm, weight=delta.norm.weight.to(device))
    return replace(delta, conv=conv, rate=rate, time_bias=bias, norm=norm)


def integers(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("padding", [0, 2])
def test_outputs_and_states_equal_the_reference(name: str, padding: int, device: torch.device) -> None:
    shape, lengths = SHAPES[name], (1, 2, 9)
    delta, tokens = random_delta(shape), sum(lengths) + padding
    rows = torch.randn(tokens, shape.in_width)
    pool = torch.full((BLOCKS, 2, shape.cache.elements), torch.nan)
    pool[0], pool[1:3] = 0, torch.randn(2, 2, shape.cache.elements)
    tables = torch.cat([integers(0, 3, 1, 4, 2, 5).view(3, 2), integers(0, 3).view(1, 2).expand(padding, 2)])
    starts = integers(0, *accumulate((*lengths, *[1] * padding)))
    contexts = integers(*lengths, *[0] * padding)
    there = pool.to(device)
    arguments = (tables.to(device), starts.to(device), contexts.to(device))
    got = gated_delta_rule(rows.to(device), there[:, 1], *arguments, on(device, delta)).float().cpu()
    want = reference.gated_delta_rule(rows, pool[:, 1], tables, starts, contexts, delta)
    live = sum(lengths)
    torch.testing.assert_close(got[:live], want[:live], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(there.cpu(), pool, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert not there[0].any()


def test_two_steps_give_the_bits_of_a_single_step(device: torch.device) -> None:
    shape = SHAPES["tiled"]
    delta, rows = on(device, random_delta(shape)), torch.randn(11, shape.in_width, device=device)
    pool = torch.zeros(BLOCKS, shape.cache.elements, device=device)

    def step(part: Tensor, source: int, target: int) -> Tensor:
        lists = integers(source, target).view(1, 2), integers(0, len(part)), integers(len(part))
        tables, starts, contexts = (it.to(device) for it in lists)
        return gated_delta_rule(part.contiguous(), pool, tables, starts, contexts, delta)

    whole = step(rows, 0, 1)
    for cut in (1, 4, 10):
        parts = torch.cat([step(rows[:cut], 0, 2), step(rows[cut:], 2, 3)])
        assert torch.equal(parts, whole)
        assert torch.equal(pool[3], pool[1])
