"""The passes over chunks of rows, and the shortlists found from them, against plain torch."""

import random

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.chunk_passes import CHUNKS, ChunkSizes, Maxima, chunk_weights, find_maxima
from engine.kernels.row_passes import id_of, logit_of
from engine.kernels.sampling_rows import SampleTarget, build_rows
from engine.kernels.shortlist import load_groups, write_shortlist
from engine.request import Request
from engine.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("fenced_memory")

VOCABULARIES = (1, 7, 100, 4096, 5000, 32000, 262208)
CAPACITY = 256


@triton.jit
def _unpack_kernel(ranks: tl.tensor, ids: tl.tensor, logits: tl.tensor, ID_BITS: tl.constexpr) -> None:
    place = tl.program_id(0)
    rank = tl.load(ranks + place)
    tl.store(ids + place, id_of(rank, ID_BITS))
    tl.store(logits + place, logit_of(rank, ID_BITS))


@triton.jit
def _shortlist_kernel(
    row: tl.tensor,
    vocabulary: tl.tensor,
    groups: tl.tensor,
    chunks: tl.tensor,
    floor: tl.tensor,
    near: tl.tensor,
    shortlist: tl.tensor,
    count: tl.tensor,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    ID_BITS: tl.constexpr,
) -> None:
    keys = load_groups(groups, chunks, GROUPS, CHUNKS)
    found = write_shortlist(
        row, vocabulary, keys, tl.load(floor), near, shortlist, BLOCK, GROUPS, CHUNKS, CAPACITY, ID_BITS
    )
    tl.store(count, found)


def unpacked(ranks: Tensor, sizes: ChunkSizes) -> tuple[Tensor, Tensor]:
    """Return the ids and logits of ranks, on the host."""
    ids = torch.empty(ranks.shape, dtype=torch.int32, device=ranks.device)
    logits = torch.empty(ranks.shape, dtype=torch.float32, device=ranks.device)
    if ranks.numel():
        _unpack_kernel[(ranks.numel(),)](ranks.contiguous(), ids, logits, ID_BITS=sizes.id_bits)
    return ids.cpu(), logits.cpu()


def found_in(logits: Tensor, device: torch.device) -> tuple[Maxima, ChunkSizes]:
    """Return the maxima of all rows, which have a distance between them in memory."""
    maxima = Maxima.empty(logits.to(device))
    apart = torch.nn.functional.pad(logits, (0, 16), value=torch.nan).to(device)
    find_maxima(apart[:, : logits.shape[1]], maxima)
    return maxima, ChunkSizes.of(logits.shape[1])


def in_chunks(logits: Tensor, sizes: ChunkSizes) -> Tensor:
    """Return float32 [rows, chunks, block], padded with -inf."""
    missing = sizes.chunks * sizes.block - logits.shape[1]
    return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf).view(len(logits), sizes.chunks, -1)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_peaks_are_the_first_maxima_of_their_chunks(vocabulary: int, device: torch.device) -> None:
    logits = torch.randn(4, vocabulary).mul(4).round() / 4
    logits[1] = -torch.inf
    logits[2, vocabulary // 2 :] = torch.inf
    logits[3, random.randrange(vocabulary)] = random.choice([torch.nan, -torch.nan])
    maxima, sizes = found_in(logits, device)
    ids, values = unpacked(maxima.peaks, sizes)
    chunks = in_chunks(logits, sizes)
    expected = chunks.amax(-1)
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)
    firsts = (chunks == expected[..., None]).int().argmax(-1) + sizes.block * torch.arange(sizes.chunks)
    known = ~expected.isnan()
    assert torch.equal(ids[known], firsts[known].int())


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_groups_have_their_largest_logits(vocabulary: int, device: torch.device) -> None:
    logits = torch.randn(2, vocabulary).abs()  # as ordered integers, these are their bits
    logits[1, ::3] = 0.0
    maxima, sizes = found_in(logits, device)
    run = min(8, sizes.block // sizes.groups)
    expected = in_chunks(logits, sizes).reshape(2, sizes.chunks, -1, sizes.groups, run).amax((2, 4))
    groups = maxima.groups.cpu().view(torch.float32).view(expected.shape)
    assert torch.equal(groups[expected >= 0], expected[expected >= 0])
    assert (maxima.groups.cpu().view(expected.shape)[expected == -torch.inf] < 0).all()


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_weights_of_chunks_equal_sums_in_float64(vocabulary: int, device: torch.device) -> None:
    """Weights are those of draws without top-k. The others use none, and get zeros."""
    params = [{}, {"temperature": 0.6, "min_p": 0.05}, {"temperature": 0}, {"top_k": 5}, {"temperature": 1e-30}]
    logits = torch.randn(len(params), vocabulary) * 2
    chosen = [SamplingParams(**it) for it in params]  # type: ignore[arg-type]
    targets = [SampleTarget(row, Request(row, (1,), it), 0) for row, it in enumerate(chosen)]
    columns = build_rows(targets[::-1], vocabulary).to(device).columns
    maxima, sizes = found_in(logits, device)
    sums = chunk_weights(logits.to(device), maxima, columns.draws).cpu().flip(0)
    for row, it in enumerate(chosen):
        weights = torch.zeros(1, vocabulary)
        if it.temperature and not 0 < it.top_k < vocabulary:
            weights = ((logits[row : row + 1] - logits[row].max()).double() / it.temperature).exp()
            weights = torch.where(weights >= it.min_p, weights, 0.0)
        expected = in_chunks(weights, sizes).clamp(min=0).sum(-1)[0]
        torch.testing.assert_close(sums[row].double(), expected.double(), rtol=2e-6, atol=1e-12)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_shortlist_has_all_tokens_that_reach_the_threshold(vocabulary: int, device: torch.device) -> None:
    logits = torch.randn(1, vocabulary).mul(8).round() / 8
    logits[0, random.randrange(vocabulary)] = -torch.inf
    maxima, sizes = found_in(logits, device)
    count = torch.empty(1, dtype=torch.int32, device=device)
    order = logits[0].sort(descending=True).values
    for place in (0, min(vocabulary - 1, 60), vocabulary - 1):
        floor = order[place : place + 1].contiguous()
        near, shortlist = torch.empty_like(maxima.groups), torch.empty(1, CAPACITY, dtype=torch.int64, device=device)
        _shortlist_kernel[(1,)](
            logits.to(device), vocabulary, maxima.groups, sizes.chunks, floor.to(device), near, shortlist, count,
            BLOCK=sizes.block, GROUPS=sizes.groups, CHUNKS=CHUNKS, CAPACITY=CAPACITY, ID_BITS=sizes.id_bits,
        )  # fmt: skip
        expected = ((logits[0] >= floor) & (logits[0] > -torch.inf)).nonzero().flatten().int()
        if len(expected) > CAPACITY:
            assert int(count) > CAPACITY
            continue
        assert int(count) == len(expected)
        ids, values = unpacked(shortlist[0, : len(expected)], sizes)
        assert torch.equal(ids.sort().values, expected)
        assert torch.equal(values, logits[0, ids])
