"""Gated delta rules on a GPU, against the reference implementation and float64."""

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kernels import reference
from engine.kernels.delta_rule import gated_delta_rule
from engine.kernels.reference import DELTA_EPSILON
from engine.mixer_config import DeltaConfig
from engine.operations import DeltaRule, Norm

pytestmark = pytest.mark.usefixtures("fenced_memory")

BLOCKS = 8
SHAPES = {
    "shared keys": DeltaConfig(2, 4, 32, 64, 4, tiled=False),
    "tiled": DeltaConfig(2, 4, 32, 64, 4, tiled=True),
    "odd sizes": DeltaConfig(1, 3, 24, 40, 3, tiled=False),
    "small keys": DeltaConfig(1, 1, 8, 16, 2, tiled=False),
}
# (tokens of the step, tokens before it) of each request
STEPS = {
    "no whole block": ((1, 0), (2, 0), (9, 0)),
    "prompts": ((16, 0), (37, 0), (32, 16)),
    "in the middle of blocks": ((20, 5), (40, 30), (1, 15)),
    "blocks and decode": ((1, 40), (48, 3), (16, 7)),
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


@pytest.mark.share(1, "steps", "chunked")
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("padding", [0, 2])
def test_outputs_and_states_equal_the_reference(
    name: str, steps: str, chunked: bool, padding: int, device: torch.device
) -> None:
    shape, (lengths, before) = SHAPES[name], zip(*STEPS[steps], strict=True)
    delta, tokens = random_delta(shape), sum(lengths) + padding
    rows = torch.randn(tokens, shape.in_width)
    pool = torch.full((BLOCKS, 2, shape.cache.elements), torch.nan)
    pool[0], pool[1:3] = 0, torch.randn(2, 2, shape.cache.elements)
    tables = torch.cat([integers(0, 3, 1, 4, 2, 5).view(3, 2), integers(0, 3).view(1, 2).expand(padding, 2)])
    starts = integers(0, *accumulate((*lengths, *[1] * padding)))
    contexts = integers(*map(sum, zip(lengths, before, strict=True)), *[0] * padding)
    there = pool.to(device)
    arguments = (tables.to(device), starts.to(device), contexts.to(device))
    got = gated_delta_rule(rows.to(device), there[:, 1], *arguments, on(device, delta), chunked=chunked).float().cpu()
    want = reference.gated_delta_rule(rows, pool[:, 1], tables, starts, contexts, delta)
    live = sum(lengths)
    torch.testing.assert_close(got[:live], want[:live], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(there.cpu(), pool, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert not there[0].any()


@dataclass(frozen=True)
class Sequence:
    """A request that is computed in several steps, each of which reads a state and writes another."""

    delta: DeltaRule
    rows: Tensor
    pool: Tensor
    chunked: bool

    @classmethod
    def random(cls, shape: DeltaConfig, tokens: int, device: torch.device, *, chunked: bool) -> "Sequence":
        rows = torch.randn(tokens, shape.in_width, device=device)
        pool = torch.full((BLOCKS, shape.cache.elements), torch.nan, device=device)
        pool[0] = 0
        return cls(on(device, random_delta(shape)), rows, pool, chunked)

    def step(self, first: int, stop: int, source: int, target: int) -> Tensor:
        lists = integers(source, target).view(1, 2), integers(0, stop - first), integers(stop)
        tables, starts, contexts = (it.to(self.rows.device) for it in lists)
        part = self.rows[first:stop].contiguous()
        return gated_delta_rule(part, self.pool, tables, starts, contexts, self.delta, chunked=self.chunked)

    def run(self, *cuts: int) -> tuple[Tensor, Tensor]:
        """Compute all tokens in steps that end at the cuts. Returns the outputs and the last state."""
        bounds = [0, *cuts, len(self.rows)]
        steps = enumerate(pairwise(bounds))
        outputs = [self.step(*it, 1 + (number - 1) % 2 if number else 0, 1 + number % 2) for number, it in steps]
        return torch.cat(outputs), self.pool[1 + (len(bounds) - 2) % 2].clone()


# cuts, and more cuts at block boundaries. After 48, all tokens are computed one by one, as in decode.
CUTS = (
    ((), (16,)),
    ((), (16, 32, 48)),
    ((), (48, 49, 50)),
    ((5,), (5, 32)),
    ((20, 53), (16, 20, 48, 53)),
)


@pytest.mark.share(1, "name")
@pytest.mark.parametrize("name", ["tiled", "odd sizes"])
@pytest.mark.parametrize(("cuts", "more"), CUTS)
def test_cuts_at_block_boundaries_do_not_change_bits(
    name: str, cuts: tuple[int, ...], more: tuple[int, ...], device: torch.device
) -> None:
    sequence = Sequence.random(SHAPES[name], 55, device, chunked=True)
    for whole, part in zip(sequence.run(*cuts), sequence.run(*more), strict=True):
        assert torch.equal(part, whole)


@pytest.mark.share(1)
@pytest.mark.parametrize("cut", [1, 15, 17, 20])
def test_cuts_in_one_block_change_only_the_last_bits(cut: int, device: torch.device) -> None:
    sequence = Sequence.random(SHAPES["tiled"], 40, device, chunked=True)
    (outputs, state), (whole, whole_state) = sequence.run(cut), sequence.run()
    torch.testing.assert_close(outputs, whole, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(state, whole_state, rtol=1e-4, atol=1e-5)


@pytest.mark.share(1)
@pytest.mark.parametrize("cuts", [(1,), (4,), (16,), (20, 33)])
def test_no_cuts_change_bits_without_chunks(cuts: tuple[int, ...], device: torch.device) -> None:
    sequence = Sequence.random(SHAPES["tiled"], 40, device, chunked=False)
    for whole, part in zip(sequence.run(), sequence.run(*cuts), strict=True):
        assert torch.equal(part, whole)


def test_other_requests_do_not_change_bits(device: torch.device) -> None:
    sequence = Sequence.random(SHAPES["tiled"], 48, device, chunked=True)
    whole, state = sequence.run()
    others = torch.randn(21, sequence.rows.shape[1], device=device)
    lists = integers(0, 3, 0, 2, 0, 4).view(3, 2), integers(0, 20, 68, 69), integers(25, 48, 7)
    tables, starts, contexts = (it.to(device) for it in lists)
    rows = torch.cat([others[:20], sequence.rows, others[20:]])
    outputs = gated_delta_rule(rows, sequence.pool, tables, starts, contexts, sequence.delta, chunked=True)
    assert torch.equal(outputs[20:68], whole)
    assert torch.equal(sequence.pool[2], state)


# -- against float64


def exact_state(delta: DeltaRule, rows: Tensor) -> Tensor:
    """Return the matrices after all tokens of a request in float64, [value_heads, key_dim, value_dim]."""
    shape, rows = delta.config, rows.double()
    inputs = F.pad(rows[:, : shape.conv_width], (0, 0, shape.taps - 1, 0)).unfold(0, shape.taps, 1)
    mixed = F.silu(torch.einsum("nct,tc->nc", inputs, delta.conv.double()))
    keys, logits = shape.key_heads * shape.key_dim, rows[:, shape.conv_width + shape.width :]
    steps, decays = logits[:, : shape.value_heads], logits[:, shape.value_heads :]
    k = mixed[:, keys : 2 * keys].view(len(rows), shape.key_heads, shape.key_dim)
    v = mixed[:, 2 * keys :].view(len(rows), shape.value_heads, shape.value_dim)
    k = (k * torch.rsqrt(k.square().sum(-1, keepdim=True) + DELTA_EPSILON)).repeat(1, v.shape[1] // k.shape[1], 1)
    state = torch.zeros(shape.value_heads, shape.key_dim, shape.value_dim, dtype=torch.float64)
    for token in range(len(rows)):
        state *= (delta.rate.double() * F.softplus(decays[token] + delta.time_bias)).exp().view(-1, 1, 1)
        change = (v[token] - torch.einsum("hkv,hk->hv", state, k[token])) * steps[token].sigmoid().unsqueeze(-1)
        state += torch.einsum("hk,hv->hkv", k[token], change)
    return state


@pytest.mark.share(1, "repeated")
@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("rate", [-1e-4, -0.5, -30.0])
def test_states_of_long_prompts_are_nearly_exact(rate: float, repeated: bool, device: torch.device) -> None:
    """Equal keys and large step sizes make the triangular systems as badly conditioned as they can be."""
    shape = SHAPES["tiled"]
    delta = replace(random_delta(shape), rate=torch.full((shape.value_heads,), rate))
    rows = torch.randn(1, shape.in_width).repeat(160, 1) if repeated else torch.randn(160, shape.in_width)
    rows[:, shape.conv_width + shape.width :][:, : shape.value_heads] += 8.0 * repeated
    sequence = Sequence(
        on(device, delta), rows.to(device), torch.zeros(BLOCKS, shape.cache.elements, device=device), True
    )
    _, state = sequence.run()
    exact = exact_state(delta, rows)
    found = state.cpu()[-exact.numel() :].view_as(exact).double()
    assert (found - exact).norm() <= 1e-5 * exact.norm()
