"""The next token of every row on a GPU. The twin is `engine.sampling.sampler.sample`: its order, its words, its tokens.

One program samples one row, whose logits lie in the L2 cache. The floor is one pass over them for the most likely token
and two for a draw, at 64 bytes a clock for a program: 5 us each for 128,256 logits on an H100. Counted in instructions
of its machine code, a draw with top-k and top-p takes some 35 us, 12 of them in weighing. The token of a row
depends on nothing but the row. Nothing here waits for the device: what was sampled is fed to the next step there (see
`feed`), and comes to the host by one copy of `Sampled.buffer`.

Refuses to know requests.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.drawing import draw
from engine.kernels.row_passes import BELOW_ALL, floor_of, id_of, logit_of, peaks, rank_of, top_of, weigh
from engine.kernels.sampling_rows import Sampled, SamplingRows
from engine.kernels.shaping import left_of, report_draws, shaped
from engine.sampling.drawing import PREFIXES, SMALLEST_TEMPERATURE, TRIES, Filters

BLOCK = 4096  # logits that a program looks at together, where those are
CHUNKS = 64  # all of a row
ID_BITS = 20  # of a token id in a rank, and as many more as it takes: mostly one machine code for all vocabularies
CAPACITY = 2048  # tokens of a row that it can sort
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
    best, ids = peaks(row, vocabulary, BLOCK)
    _, pick, good = top_of(best, ids)
    tl.store(tokens + index, tl.where(good, pick, -1).to(tl.int64))


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
    TRIES: tl.constexpr,
    PREFIX: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    ID_BITS: tl.constexpr,
) -> None:
    index = tl.program_id(0)
    row = logits + tl.load(sources + index).to(tl.int64) * stride
    temperature = tl.load(temperatures + index)
    best, ids = peaks(row, vocabulary, BLOCK)
    peak, pick, good = top_of(best, ids)
    token = tl.where(good, pick, -1)
    # Where all logits are -inf, or one is inf, there is no distribution to draw from.
    if good & (temperature > 0) & (tl.abs(peak) < float("inf")):
        scale = LOG2_E / tl.maximum(temperature, COOLEST)
        least, top_k, top_p = tl.load(min_ps + index), tl.load(top_ks + index), tl.load(top_ps + index)
        floor = peak + float("inf")
        if (top_k < vocabulary) | (top_p < 1):
            need = tl.where(top_k < vocabulary, top_k, PREFIX)
            floor = floor_of(best, tl.minimum(need, tl.minimum(CAPACITY // 2, vocabulary)))
        shortlist = shortlists + index * CAPACITY
        sums, count = weigh(row, vocabulary, peak, scale, least, floor, shortlist, BLOCK, CHUNKS, CAPACITY, ID_BITS)
        complete = (floor == -float("inf")) | (count == vocabulary)
        token = draw(
            row, vocabulary, peak, pick, sums, shortlist, count, complete, scale, least, top_k, top_p,
            uniforms + index * TRIES, TRIES, PREFIX, BLOCK, CHUNKS, CAPACITY, ID_BITS,
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
    picked: tl.tensor,
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
        best, _ = peaks(row, vocabulary, BLOCK)
        peak = tl.max(best)
        floor = floor_of(best, tl.minimum(tl.maximum(wanted, 1), vocabulary))
        shortlist = shortlists + index * CAPACITY
        sums, count = weigh(
            row, vocabulary, peak, LOG2_E, 0.0, floor, shortlist,
            BLOCK, CHUNKS, CAPACITY, ID_BITS,
        )  # fmt: skip
        normalizer = peak + tl.log(tl.sum(sums))
        tl.store(picked + index, tl.load(row + token) - normalizer)
        places = tl.arange(0, CAPACITY)
        ranks = tl.load(shortlist + places, mask=places < count, other=BELOW_ALL)
        above = rank_of(peak, -1, ID_BITS)
        for place in range(wanted):
            rank = tl.max(tl.where(ranks < above, ranks, BELOW_ALL))
            if count > CAPACITY:
                rank = _next_rank(row, vocabulary, above, BLOCK, ID_BITS)
            there = rank > BELOW_ALL
            tl.store(top_ids + index * width + place, tl.where(there, id_of(rank, ID_BITS), -1))
            tl.store(top + index * width + place, tl.where(there, logit_of(rank, ID_BITS) - normalizer, 0.0))
            above = rank


@triton.jit
def _next_rank(
    row: tl.tensor, vocabulary: tl.tensor, above: tl.tensor, BLOCK: tl.constexpr, ID_BITS: tl.constexpr
) -> tl.tensor:
    """The highest rank of the whole row that is below one."""
    lanes = tl.arange(0, BLOCK)
    found = tl.full([BLOCK], BELOW_ALL, tl.int64)
    for start in range(0, vocabulary, BLOCK):
        ids = start + lanes
        ranks = rank_of(tl.load(row + ids, mask=ids < vocabulary, other=-float("inf")), ids, ID_BITS)
        found = tl.maximum(found, tl.where((ranks < above) & (ids < vocabulary), ranks, BELOW_ALL))
    return tl.max(found)


def sample(logits: Tensor, rows: SamplingRows) -> Sampled:
    """The next token of each of `rows`, which are on the device of the logits.

    logits float32 [any rows, vocabulary], each row contiguous; they are left as they are, and read until the stream has
    come past this. What the host must know before it makes `rows`: see `needs_reply`.
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
    if len(columns.edit_ids) or len(columns.words) or len(columns.left_out):
        drawn, sources = shaped(logits, rows), torch.arange(count, dtype=torch.int32, device=logits.device)
    if len(columns.left_out):
        filters = left_of(drawn, rows)
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
        COOLEST=SMALLEST_TEMPERATURE, TRIES=TRIES, PREFIX=PREFIXES[0], **sizes,
    )  # fmt: skip
    if rows.alternatives is not None:
        result = sampled.columns
        _logprobs_kernel[(count,)](
            logits, columns.sources, logits.stride(0), vocabulary, tokens, columns.alternatives,
            result.picked, result.top_ids, result.top, rows.alternatives, shortlists, **sizes,
        )  # fmt: skip
        if len(columns.drawn):
            left = Filters(rows.filters.temperature, min_p.view(-1, 1), top_k.view(-1, 1), top_p.view(-1, 1))
            report_draws(drawn.index_select(0, sources[columns.drawn]), left.rows(columns.drawn), rows, result)
    return sampled
