"""Gated short convolutions on a GPU, against the reference implementation."""

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from engine.kernels import reference
from engine.kernels.short_convolution import TOKENS, short_convolution

pytestmark = pytest.mark.usefixtures("fenced_memory")

BLOCKS = 12
LENGTHS = (1, 2, 3, 17, 40)
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def inputs(width: int, taps: int, lengths: tuple[int, ...], padding: int = 0) -> Inputs:
    """Return random arguments. The first request reads the initial state, and blocks that are not read are NaN.

    Pools are those of the second of three layers.
    """
    tokens, requests = sum(lengths) + padding, len(lengths)
    rows = torch.randn(tokens, 3 * width).bfloat16()
    pool = torch.full((BLOCKS, 3, (taps - 1) * width), torch.nan)
    sources = torch.tensor([0, *range(1, requests)])
    pool[sources] = torch.randn(requests, 3, (taps - 1) * width)
    pool[0] = 0
    tables = torch.stack([sources, torch.arange(requests) + requests], dim=1).int()
    tables = torch.cat([tables, tables[:1].expand(padding, 2)])  # those of padding requests are stale
    starts = torch.tensor([0, *accumulate((*lengths, *[1] * padding))], dtype=torch.int32)
    contexts = torch.tensor([*lengths, *[0] * padding], dtype=torch.int32)
    return rows, pool[:, 1], tables, starts, contexts, torch.randn(taps, width)


def on(device: torch.device, given: Inputs) -> Inputs:
    rows, pool, *others = given
    whole = torch.full((BLOCKS, 3, pool.shape[1]), torch.nan, device=device)
    whole[:, 1] = pool
    others = [it.to(device) for it in others]
    return rows.to(device), whole[:, 1], *others  # type: ignore[return-value]


@pytest.mark.parametrize(("width", "taps"), [(64, 3), (200, 4), (129, 2), (96, TOKENS)])
@pytest.mark.parametrize("padding", [0, 3])
def test_outputs_and_states_equal_the_reference(width: int, taps: int, padding: int, device: torch.device) -> None:
    given = inputs(width, taps, LENGTHS, padding)
    there = on(device, given)
    got = short_convolution(*there).float().cpu()
    want = reference.short_convolution(given[0].float(), *given[1:])
    live = sum(LENGTHS)
    torch.testing.assert_close(got[:live], want[:live], rtol=2e-2, atol=2e-2)
    assert torch.equal(there[1].cpu().isnan(), given[1].isnan())
    torch.testing.assert_close(there[1].cpu(), given[1], rtol=0, atol=0, equal_nan=True)
    assert not there[1][0].any()


def test_two_steps_give_the_bits_of_a_single_step(device: torch.device) -> None:
    rows, pool, tables, starts, counts, weight = on(device, inputs(64, 3, (37,)))
    whole = short_convolution(rows, pool, tables, starts, counts, weight)
    state, then = pool[1].clone(), torch.tensor([[1, 5]], dtype=torch.int32, device=device)
    for cut in (1, 2, 16, 36):
        outputs = []
        for part, table in ((rows[:cut], tables), (rows[cut:], then)):
            starts = torch.tensor([0, len(part)], dtype=torch.int32, device=device)
            outputs.append(short_convolution(part.contiguous(), pool, table, starts, counts, weight))
        assert torch.equal(torch.cat(outputs), whole)
        assert torch.equal(pool[5], state)


def test_null_block_is_not_written(device: torch.device) -> None:
    rows, pool, tables, starts, counts, weight = on(device, inputs(64, 3, (5,)))
    short_convolution(rows, pool, torch.zeros_like(tables), starts, counts, weight)
    assert not pool[0].any()


def test_more_taps_than_the_kernel_supports_are_rejected(device: torch.device) -> None:
    with pytest.raises(ValueError, match=f"at most {TOKENS}"):
        short_convolution(*on(device, inputs(64, TOKENS + 1, (3,))))
