"""Sample the next token of each row on a GPU. Reference implementation: `engine.sampling.sampler.sample`.

Many programs read the logits, which are in the L2 cache: they find the largest logit of each chunk of a row, and sum
the weights of chunks (see `engine.kernels.chunk_passes`). One program per row then draws from a shortlist of the most
likely tokens. It reads the whole row only if the filters keep tokens outside of the shortlist. A CUDA graph includes
the draws of requests without edits, masks, and log-probabilities (`draw_tokens`). Times for 128,256 logits on an H100,
by instruction count without latencies: 0.4 us for each pass, and 10 us for a draw with top-k and top-p, 6 of them to
search the shortlist.

The token of a row depends only on the row. Nothing here waits for the device: sampled tokens are copied into the next
step on the device (see `fill_pending_tokens`), and one copy of `Sampled.buffer` transfers them to the host.
"""

from typing import NamedTuple, Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.chunk_passes import CHUNKS, ChunkSizes, chunk_weights, load_sums, top_rank
from engine.kernels.logit_edits import apply_xtc, edited_logits, report_draw_logprobs
from engine.kernels.row_passes import BELOW_ALL, id_of, logit_of, rank_of, scale_of
from engine.kernels.sampling_rows import Draws, Sampled, SampledColumns, SamplingRows
from engine.kernels.shortlist import load_groups, shortlist_threshold, write_shortlist
from engine.kernels.step_logits import StepLogits
from engine.kernels.token_draw import draw
from engine.sampling.drawing import ATTEMPTS, PREFIXES, SMALLEST_TEMPERATURE, Filters

CAPACITY = 2048  # maximum number of tokens in a row's shortlist
WARPS = 8


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
    peaks: tl.tensor,
    groups: tl.tensor,
    sums: tl.tensor,
    near: tl.tensor,
    shortlists: tl.tensor,
    COOLEST: tl.constexpr,
    ATTEMPTS: tl.constexpr,
    PREFIX: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    ID_BITS: tl.constexpr,
) -> None:
    index, chunks = tl.program_id(0), tl.cdiv(vocabulary, BLOCK)
    source = tl.load(sources + index).to(tl.int64)
    row = logits + source * stride
    temperature = tl.load(temperatures + index)
    best = top_rank(peaks + source * chunks, chunks, CHUNKS)
    peak, best_id = logit_of(best, ID_BITS), id_of(best, ID_BITS)
    token = tl.where(peak == peak, best_id, -1)
    # If all logits are -inf, or one is inf or NaN, there is no distribution to draw from.
    if (temperature > 0) & (tl.abs(peak) < float("inf")):
        scale, least = scale_of(temperature, COOLEST), tl.load(min_ps + index)
        top_k, top_p = tl.load(top_ks + index), tl.load(top_ps + index)
        shortlist, count, complete = shortlists + index * CAPACITY, tl.full([], 0, tl.int32), vocabulary < 0
        if (top_k < vocabulary) | (top_p < 1):
            keys = load_groups(groups + source * chunks * GROUPS, chunks, GROUPS, CHUNKS)
            need = tl.where(top_k < vocabulary, top_k, PREFIX)
            floor = shortlist_threshold(keys, tl.minimum(need, tl.minimum(CAPACITY // 2, vocabulary)))
            count = write_shortlist(
                row, vocabulary, keys, floor, near + index * chunks * GROUPS, shortlist,
                BLOCK, GROUPS, CHUNKS, CAPACITY, ID_BITS,
            )  # fmt: skip
            complete = (floor == -float("inf")) | (count == vocabulary)
        token = draw(
            row, vocabulary, peak, best_id, load_sums(sums + index * chunks, chunks, CHUNKS), shortlist, count,
            complete, scale, least, top_k, top_p, uniforms + index * ATTEMPTS,
            ATTEMPTS, PREFIX, BLOCK, CHUNKS, CAPACITY, ID_BITS,
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
    peaks: tl.tensor,
    groups: tl.tensor,
    sums: tl.tensor,
    near: tl.tensor,
    shortlists: tl.tensor,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    ID_BITS: tl.constexpr,
) -> None:
    index, chunks = tl.program_id(0), tl.cdiv(vocabulary, BLOCK)
    wanted = tl.load(alternatives + index)
    token = tl.load(tokens + index)
    if (wanted >= 0) & (token >= 0):
        source = tl.load(sources + index).to(tl.int64)
        row = logits + source * stride
        peak = logit_of(top_rank(peaks + source * chunks, chunks, CHUNKS), ID_BITS)
        normalizer = peak + tl.log(tl.sum(load_sums(sums + index * chunks, chunks, CHUNKS)))
        tl.store(token_logprobs + index, tl.load(row + token) - normalizer)
        keys = load_groups(groups + source * chunks * GROUPS, chunks, GROUPS, CHUNKS)
        floor = shortlist_threshold(keys, tl.minimum(tl.maximum(wanted, 1), vocabulary))
        shortlist = shortlists + index * CAPACITY
        count = write_shortlist(
            row, vocabulary, keys, floor, near + index * chunks * GROUPS, shortlist,
            BLOCK, GROUPS, CHUNKS, CAPACITY, ID_BITS,
        )  # fmt: skip
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


def sample(logits: StepLogits, rows: SamplingRows) -> Sampled:
    """Sample one token for each row of `rows`, whose tensors are on the device of the logits.

    The logits are not modified, and must stay valid until the stream has executed this call. Requests for which
    `needs_reply` is true need their previous token on the host first.
    """
    columns = rows.columns
    sampled = Sampled.blank(len(columns.sources), rows.alternatives, logits.values.device)
    drawn, left = _edited(logits, rows)
    lists = draw_tokens(drawn, left, sampled.columns.token_ids)
    if rows.alternatives is not None:
        _report_logprobs(logits, rows, lists, sampled.columns)
    if len(columns.drawn):
        filters = Filters(rows.filters.temperature, *(it.view(-1, 1) for it in (left.min_p, left.top_k, left.top_p)))
        values = drawn.values.index_select(0, left.sources[columns.drawn])
        report_draw_logprobs(values, filters.rows(columns.drawn), rows, sampled.columns)
    return sampled


def draw_tokens(logits: StepLogits, draws: Draws, tokens: Tensor) -> "Shortlists":
    """Draw a token for each row of `draws`, and write them to `tokens`, int64 [R]. Returns memory to use again."""
    lists, values = Shortlists.empty(len(draws.sources), logits), logits.values
    _sample_kernel[(len(draws.sources),)](
        values, draws.sources, values.stride(0), values.shape[1], tokens,
        draws.temperature, draws.min_p, draws.top_k, draws.top_p, draws.uniforms,
        *logits.maxima, chunk_weights(values, logits.maxima, draws), *lists,
        COOLEST=SMALLEST_TEMPERATURE, ATTEMPTS=ATTEMPTS, PREFIX=PREFIXES[0], **lists.constants(logits),
    )  # fmt: skip
    return lists


class Shortlists(NamedTuple):
    """Memory for the shortlists of R rows."""

    near: Tensor  # int32 [R, chunks * groups]: groups that have tokens of the shortlist
    shortlists: Tensor  # int64 [R, capacity]: ranks of tokens

    @classmethod
    def empty(cls, count: int, logits: StepLogits) -> Self:
        device, sizes = logits.values.device, ChunkSizes.of(logits.values.shape[1])
        capacity = max(2 * PREFIXES[0], min(CAPACITY, sizes.block))
        return cls(
            torch.empty(count, logits.maxima.groups.shape[1], dtype=torch.int32, device=device),
            torch.empty(count, capacity, dtype=torch.int64, device=device),
        )

    def constants(self, logits: StepLogits) -> dict[str, int]:
        """Return the constants of the kernels that use the lists."""
        sizes = ChunkSizes.of(logits.values.shape[1])
        return {
            "BLOCK": sizes.block,
            "GROUPS": sizes.groups,
            "CHUNKS": CHUNKS,
            "CAPACITY": self.shortlists.shape[1],
            "ID_BITS": sizes.id_bits,
            "num_warps": WARPS,
        }


def _edited(logits: StepLogits, rows: SamplingRows) -> tuple[StepLogits, Draws]:
    """Return the logits to draw from, and the draws with the rows and filters that apply to them."""
    columns, draws = rows.columns, rows.columns.draws
    if not (len(columns.edit_ids) or len(columns.words) or len(columns.xtc_rows)):
        return logits, draws
    edited = edited_logits(logits.values, rows)
    draws = draws._replace(sources=torch.arange(len(edited), dtype=torch.int32, device=edited.device))
    if len(columns.xtc_rows):
        left = apply_xtc(edited, rows)
        draws = draws._replace(min_p=left.min_p, top_k=left.top_k, top_p=left.top_p)
    return StepLogits.of(edited), draws


def _report_logprobs(logits: StepLogits, rows: SamplingRows, lists: Shortlists, sampled: SampledColumns) -> None:
    """Report the log-probabilities of the model's distribution, in the rows that request them."""
    columns, values = rows.columns, logits.values
    unfiltered = columns.draws._replace(
        temperature=torch.ones_like(columns.temperature),
        min_p=torch.zeros_like(columns.min_p),
        top_k=torch.full_like(columns.top_k, values.shape[1]),
    )
    _logprobs_kernel[(len(columns.sources),)](
        values, columns.sources, values.stride(0), values.shape[1], sampled.token_ids, columns.alternatives,
        sampled.token_logprobs, sampled.top_ids, sampled.top, rows.alternatives,
        *logits.maxima, chunk_weights(values, logits.maxima, unfiltered), *lists, **lists.constants(logits),
    )  # fmt: skip
