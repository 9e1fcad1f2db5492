"""Edit the logits of requests on a GPU: bias and forbidden tokens, then penalties, then grammar masks.

Reference implementations: `apply_bias`, `forbid_early_end`, `apply_penalties`, and `masked` of
`engine.sampling.sampler`. XTC uses the same function as on the host.

Lower bound: the memory traffic of a copy, 8 bytes per logit for all rows and 8 more for rows with a grammar. The logits
are copied because log-probabilities need the unmodified ones.
"""

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.sampling_rows import SampledColumns, SamplingRows
from engine.sampling.drawing import Filters, sampled_logprobs
from engine.sampling.filters import xtc_logits

EDITS = 256  # number of edits that one program applies
BLOCK = 4096  # logits that a program masks per iteration


@triton.jit(do_not_specialize=["count"])
def _edit_kernel(
    logits: tl.tensor,
    vocabulary: tl.tensor,
    rows: tl.tensor,
    ids: tl.tensor,
    biases: tl.tensor,
    counts: tl.tensor,
    repetitions: tl.tensor,
    presences: tl.tensor,
    frequencies: tl.tensor,
    count: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    edit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = edit < count
    row = tl.load(rows + edit, mask=inside, other=0)
    logit = logits + row.to(tl.int64) * vocabulary + tl.load(ids + edit, mask=inside, other=0)
    value = tl.load(logit, mask=inside) + tl.load(biases + edit, mask=inside)
    times = tl.load(counts + edit, mask=inside, other=-1)
    factor = tl.load(repetitions + row, mask=inside & (times >= 0), other=1.0)
    value = tl.where(value > 0, value / factor, value * factor)
    frequency = tl.load(frequencies + row, mask=inside & (times > 0), other=0.0)
    presence = tl.load(presences + row, mask=inside & (times > 0), other=0.0)
    tl.store(logit, value - (frequency * times + presence), mask=inside)


@triton.jit
def apply_mask(
    source: tl.tensor, target: tl.tensor, words: tl.tensor, vocabulary: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    """Copy a row, and set the logits of all tokens whose bit in `words` is 0 to -inf. NaN stays NaN.

    Returns whether no token with a logit above -inf is left.
    """
    lanes = tl.arange(0, BLOCK)
    possible = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocabulary, BLOCK):
        ids = start + lanes
        value = tl.load(source + ids, mask=ids < vocabulary, other=-float("inf"))
        bits = tl.load(words + ids // 32, mask=ids < vocabulary, other=0) >> (ids % 32)
        value = tl.where(((bits & 1) != 0) | (value != value), value, -float("inf"))
        possible |= (value != -float("inf")).to(tl.int32)
        tl.store(target + ids, value, mask=ids < vocabulary)
    return tl.sum(possible) == 0


@triton.jit
def _mask_kernel(
    edited: tl.tensor,
    logits: tl.tensor,
    sources: tl.tensor,
    stride: tl.tensor,
    vocabulary: tl.tensor,
    mask_rows: tl.tensor,
    words: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64)
    mask_row = tl.load(mask_rows + index).to(tl.int64)
    if mask_row >= 0:
        target, bits = edited + index * vocabulary, words + mask_row * width
        if apply_mask(target, target, bits, vocabulary, BLOCK):
            source = logits + tl.load(sources + index).to(tl.int64) * stride
            apply_mask(source, target, bits, vocabulary, BLOCK)


def edited_logits(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Return the logits to sample from, in the order of `rows`: float32 [rows, vocabulary].

    If the edits forbid every token that the grammar allows, the grammar is applied to the unedited row instead.
    """
    columns = rows.columns
    edited = logits.index_select(0, columns.sources)
    edits, (masks, width) = len(columns.edit_ids), columns.words.shape
    if edits:
        _edit_kernel[(triton.cdiv(edits, EDITS),)](
            edited, edited.shape[1], columns.edit_rows, columns.edit_ids, columns.bias, columns.counts,
            columns.repetition, columns.presence, columns.frequency, edits, BLOCK=EDITS,
        )  # fmt: skip
    if masks:
        _mask_kernel[(len(edited),)](
            edited, logits, columns.sources, logits.stride(0), edited.shape[1], columns.mask_rows, columns.words, width,
            BLOCK=min(BLOCK, triton.next_power_of_2(edited.shape[1])), num_warps=8,
        )  # fmt: skip
    return edited


def apply_xtc(edited: Tensor, rows: SamplingRows) -> Filters:
    """Apply XTC in place to the rows that use it. Returns the filters that remain to be applied."""
    hit, filters = rows.columns.xtc_rows, rows.filters
    left = xtc_logits(edited[hit], filters.rows(hit), rows.columns.xtc_thresholds[:, None])
    edited.index_copy_(0, hit, left)
    return filters.without_filters(hit, edited.shape[1])


def report_draw_logprobs(drawn_from: Tensor, filters: Filters, rows: SamplingRows, sampled: SampledColumns) -> None:
    """Replace the model's log-probabilities by those of the distribution drawn from, in the rows that request this.

    `drawn_from`: the logits of these rows, float32 [rows, vocabulary]. `filters`: the filters of these rows.
    """
    hit = rows.columns.drawn
    logprobs, ids, top = sampled_logprobs(drawn_from, filters, sampled.token_ids[hit], rows.alternatives or 0)
    sampled.token_logprobs.index_copy_(0, hit, logprobs.float())
    sampled.top_ids.index_copy_(0, hit, ids.int())
    sampled.top.index_copy_(0, hit, top.float())
