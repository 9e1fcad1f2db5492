"""Sample the next token of each row on a GPU. Reference implementation: `engine.sampling.sampler.sample`.

One program samples one row, whose logits are in the L2 cache. Lower bound: one pass over the logits for greedy sampling
and two for a draw. At 64 bytes per clock and program, a pass over 128,256 logits takes 5 us on an H100. By instruction
count, a draw with top-k and top-p takes about 35 us, 12 of them to compute weights. The token of a row depends only on
the row. Nothing here waits for the device: sampled tokens are copied into the next step on the device (see
`fill_pending_tokens`), and one copy of `Sampled.buffer` transfers them to the host.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.logit_edits import apply_xtc, edited_logits, report_draw_logprobs
from engine.kernels.row_passes import (
    BELOW_ALL,
    find_argmax,
    id_of,
    lane_maxima,
    logit_of,
    rank_of,
    shortlist_threshold,
    sum_chunks,
)
from engine.kernels.sampling_rows import Sampled, SamplingRows
from engine.kernels.token_draw import draw
from engine.sampling.drawing import ATTEMPTS, PREFIXES, SMALLEST_TEMPERATURE, Filters

BLOCK = 4096  # minimum number of logits that a program processes at a time
CHUNKS = 64  # maximum number of chunks per row
# minimum number of bits for the token id in a rank, equal for most vocabularies, so that they share one compiled kernel
ID_BITS = 20
CAPACITY = 2048  # maximum number of tokens in a row's shortlist
WARPS = 16
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _greedy_kernel(
    logits: tl.tensor,
    sources: tl.tensor,
    stride: tl.tensor,
    vocabulary: tl.tensor,
    tokens: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    index = tl.program_id(0)
    row = logits + tl.load(sources + index).to(tl.int64) * stride
    best, ids = lane_maxima(row, vocabulary, BLOCK)
    _, best_id, good = find_argmax(best, ids)
    tl.store(tokens + index, tl.where(good, best_id, -1).to(tl.int64))


@triton.jit
def _sample_kernel(
    logits: tl.tensor,
    sources: tl.tensor,
    stride: tl.tensor,
    vocabulary: tl.tensor,
    tokens: tl.tensor,
    temperatures: tl.tensor,
    min_ps: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    uniforms: tl.tensor,
    shortlists: tl.tensor,
    COOLEST: tl.constexpr,
    ATTEMPTS: tl.constexpr,
    PREFIX: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    ID_BITS: tl.constexpr,
) -> None:
    index = tl.program_id(0)
    row = logits + tl.load(sources + index).to(tl.int64) * stride
    temperature = tl.load(temperatures + index)
    best, ids = lane_maxima(row, vocabulary, BLOCK)
    peak, best_id, good = find_argmax(best, ids)
    token = tl.where(good, best_id, -1)
    # If all logits are -inf, or one is inf, there is no distribution to draw from.
    if good & (temperature > 0) & (tl.abs(peak) < float("inf")):
        scale = LOG2_E / tl.maximum(temperature, COOLEST)
        least, top_k, top_p = tl.load(min_ps + index), tl.load(top_ks + index), tl.load(top_ps + index)
        floor = peak + float("inf")
        if (top_k < vocabulary) | (top_p < 1):
            need = tl.where(top_k < vocabulary, top_k, PREFIX)
            floor = shortlist_threshold(best, tl.minimum(need, tl.minimum(CAPACITY // 2, vocabulary)))
        shortlist = shortlists + index * CAPACITY
        sums, count = sum_chunks(
            row, vocabulary, peak, scale, least, floor, shortlist, BLOCK, CHUNKS, CAPACITY, ID_BITS
        )
        complete = (floor == -float("inf")) | (count == vocabulary)
        token = draw(
            row, vocabulary, peak, best_id, sums, shortlist, count, complete, scale, least, top_k, top_p,
            uniforms + index * ATTEMPTS, ATTEMPTS, PREFIX, BLOCK, CHUNKS, CAPACITY, ID_BITS,
        )  # fmt: skip
    tl.store(tokens + index, token.to(tl.int64))


@triton.jit(do_not_specialize=["width"])
def _logprobs_kernel(
    logits: tl.tensor,
    sources: tl.tensor,
    stride: tl.tensor,
    vocabulary: tl.tensor,
    tokens: tl.tensor,
    alternatives: tl.tensor,
    token_logprobs: tl.tensor,
    top_ids: tl.tensor,
    top: tl.tensor,
    width: tl.tensor,
    shortlists: tl.tensor,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    ID_BITS: tl.constexpr,
) -> None:
    index = tl.program_id(0)
    wanted = tl.load(alternatives + index)
    token = tl.load(tokens + index)
    if (wanted >= 0) & (token >= 0):
        row = logits + tl.load(sources + index).to(tl.int64) * stride
        best, _ = lane_maxima(row, vocabulary, BLOCK)
        peak = tl.max(best)
        floor = shortlist_threshold(best, tl.minimum(tl.maximum(wanted, 1), vocabulary))
        shortlist = shortlists + index * CAPACITY
        sums, count = sum_chunks(
            row, vocabulary, peak, LOG2_E, 0.0, floor, shortlist,
            BLOCK, CHUNKS, CAPACITY, ID_BITS,
        )  # fmt: skip
        normalizer = peak + tl.log(tl.sum(sums))
        tl.store(token_logprobs + index, tl.load(row + token) - normalizer)
        entries = tl.arange(0, CAPACITY)
        ranks = tl.load(shortlist + entries, mask=entries < count, other=BELOW_ALL)
        above = rank_of(peak, -1, ID_BITS)
        for number in range(wanted):
            rank = tl.max(tl.where(ranks < above, ranks, BELOW_ALL))
            if count > CAPACITY:
                rank = _next_rank(row, vocabulary, above, BLOCK, ID_BITS)
            there = rank > BELOW_ALL
            tl.store(top_ids + index * width + number, tl.where(there, id_of(rank, ID_BITS), -1))
            tl.store(top + index * width + number, tl.where(there, logit_of(rank, ID_BITS) - normalizer, 0.0))
            above = rank


@triton.jit
def _next_rank(
    row: tl.tensor, vocabulary: tl.tensor, above: tl.tensor, BLOCK: tl.constexpr, ID_BITS: tl.constexpr
) -> tl.tensor:
    """Return the highest rank in the whole row that is below `above`."""
    lanes = tl.arange(0, BLOCK)
    found = tl.full([BLOCK], BELOW_ALL, tl.int64)
    for start in range(0, vocabulary, BLOCK):
        ids = start + lanes
        ranks = rank_of(tl.load(row + ids, mask=ids < vocabulary, other=-float("inf")), ids, ID_BITS)
        found = tl.maximum(found, tl.where((ranks < above) & (ids < vocabulary), ranks, BELOW_ALL))
    return tl.max(found)


def sample(logits: Tensor, rows: SamplingRows) -> Sampled:
    """Sample one token for each row of `rows`, whose tensors are on the device of the logits.

    `logits` is float32 [any number of rows, vocabulary], with each row contiguous. The logits are not modified, and
    must stay valid until the stream has executed this call. Requests for which `needs_reply` is true need their
    previous token on the host first.
    """
    columns, count, vocabulary = rows.columns, len(rows.columns.sources), logits.shape[1]
    sampled = Sampled.blank(count, rows.alternatives, logits.device)
    tokens = sampled.columns.token_ids
    block = min(triton.next_power_of_2(vocabulary), max(BLOCK, triton.next_power_of_2(vocabulary) // CHUNKS))
    if rows.plain:
        _greedy_kernel[(count,)](
            logits, columns.sources, logits.stride(0), vocabulary, tokens, BLOCK=block, num_warps=WARPS
        )
        return sampled
    drawn, sources = logits, columns.sources
    min_p, top_k, top_p = columns.min_p, columns.top_k, columns.top_p
    if len(columns.edit_ids) or len(columns.words) or len(columns.xtc_rows):
        drawn, sources = edited_logits(logits, rows), torch.arange(count, dtype=torch.int32, device=logits.device)
    if len(columns.xtc_rows):
        filters = apply_xtc(drawn, rows)
        min_p, top_k, top_p = filters.min_p, filters.top_k, filters.top_p
    capacity = max(2 * PREFIXES[0], min(CAPACITY, block))
    shortlists = torch.empty(count, capacity, dtype=torch.int64, device=logits.device)
    sizes = {
        "BLOCK": block,
        "CHUNKS": CHUNKS,
        "CAPACITY": capacity,
        "ID_BITS": max(ID_BITS, (vocabulary - 1).bit_length()),
        "num_warps": WARPS,
    }
    _sample_kernel[(count,)](
        drawn, sources, drawn.stride(0), vocabulary, tokens,
        columns.temperature, min_p, top_k, top_p, columns.uniforms, shortlists,
        COOLEST=SMALLEST_TEMPERATURE, ATTEMPTS=ATTEMPTS, PREFIX=PREFIXES[0], **sizes,
    )  # fmt: skip
    if rows.alternatives is not None:
        result = sampled.columns
        _logprobs_kernel[(count,)](
            logits, columns.sources, logits.stride(0), vocabulary, tokens, columns.alternatives,
            result.token_logprobs, result.top_ids, result.top, rows.alternatives, shortlists, **sizes,
        )  # fmt: skip
        if len(columns.drawn):
            left = Filters(rows.filters.temperature, min_p.view(-1, 1), top_k.view(-1, 1), top_p.view(-1, 1))
            report_draw_logprobs(drawn.index_select(0, sources[columns.drawn]), left.rows(columns.drawn), rows, result)
    return sampled
