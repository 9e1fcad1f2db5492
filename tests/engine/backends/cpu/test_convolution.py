"""Gated short convolutions on the CPU, against the reference implementation."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.backends.cpu.buffers import Activation
from engine.backends.cpu.operations import CpuOperations
from engine.batch import Batch
from engine.config import GroupConfig
from engine.kernels import reference
from engine.kv.cache import KVCache
from engine.operations import ShortConv
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

pytestmark = pytest.mark.usefixtures("plain_layouts")


def recorded(code_cache: Path, rows: Tensor, weight: Tensor, threads: int = 2) -> Recorded:
    """Record the convolution of layer 2, which shares its group with layer 1. A token's id is its row."""
    taps, width = weight.shape

    def forward(ops: CpuOperations, batch: Batch, kv: KVCache) -> Activation:
        x = ops.embed(batch, layer(ops, plain(rows)))
        return ops.convolve(x, batch, kv.state(2), ShortConv(weight))

    groups = (kv_group((0,), 1, 32), state_group((1, 2), (taps - 1) * width))
    return record(code_cache, forward, groups=groups, tokens=TOKENS, threads=threads)


def expected(rows: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs of one request, and the state after it."""
    taps, width = weight.shape
    pool, count = torch.zeros(2, (taps - 1) * width), len(rows)
    tables, starts, contexts = (torch.tensor(it) for it in ([[0, 1]], [0, count], [count]))
    return reference.short_convolution(rows, pool, tables, starts, contexts, weight), pool[1]


@pytest.mark.parametrize(("width", "taps"), [(64, 3), (96, 2), (160, 4), (320, 3)])
@pytest.mark.parametrize("threads", [1, 2])
def test_any_division_into_steps_gives_the_same_bits(width: int, taps: int, threads: int, plain_layouts: Path) -> None:
    rows, weight = torch.randn(TOKENS, 3 * width), torch.randn(taps, width)
    it = recorded(plain_layouts, rows, weight, threads)
    outputs, state = expected(rows, weight)
    wanted: tuple[Tensor, Tensor] | None = None
    for cuts in ([TOKENS], [1] * 40 + [30], [1, 2, 3, 64], [33, 37]):
        request = sequence(1, range(TOKENS), range(1, 9), [5])
        found = compute_in_steps(it.step, request, cuts, vocab_size=TOKENS, num_blocks=BLOCKS, groups=GROUPS)
        here = found, it.kv.state(2).pool[5].clone()
        torch.testing.assert_close(here[0], outputs, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(here[1], state, rtol=1e-6, atol=1e-6)
        wanted = wanted or here
        assert torch.equal(here[0], wanted[0])
        assert torch.equal(here[1], wanted[1])


def test_requests_in_one_step_do_not_affect_each_other(plain_layouts: Path) -> None:
    rows, weight = torch.randn(TOKENS, 3 * 64), torch.randn(3, 64)
    it = recorded(plain_layouts, rows, weight)
    requests = [sequence(number, range(TOKENS), range(1, 9), [number]) for number in (1, 2, 3)]
    found: dict[int, list[Tensor]] = {number: [] for number in range(3)}
    for step in range(7):
        counts = [1 + step, 3, 10 - step]
        parts = list(zip(requests, counts, strict=True))
        logits = compute(it.step, advance(parts, vocab_size=TOKENS, num_blocks=BLOCKS, groups=GROUPS))
        for number, part in enumerate(torch.split(logits, counts)):
            found[number].append(part)
    for number, request in enumerate(requests):
        outputs, state = expected(rows[: request.num_computed], weight)
        torch.testing.assert_close(torch.cat(found[number]), outputs, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(it.kv.state(2).pool[number + 1], state, rtol=1e-6, atol=1e-6)
    assert not it.kv.state(2).pool[0].any()
