"""Logits as requests want them, on a GPU: bias and forbidden tokens, penalties, grammars, in this order. The twins are
`apply_bias`, `forbid_early_end`, `apply_penalties` and `masked` of `sampling.sampler`. What XTC leaves of them is found
by the same function as on the host.

The floor is the traffic of a copy, as what the model said is still to be reported: 8 bytes for each logit of all rows,
and as many again of those that have a grammar.
"""

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.sampling_rows import SampledColumns, SamplingRows
from engine.sampling.drawing import Filters, drawn_logprobs
from engine.sampling.filters import without_top_choices

EDITS = 256  # of one program
BLOCK = 4096  # logits that a program masks together


@triton.jit(do_not_specialize=["count"])
def _edit_kernel(
    logits: tl.tensor,
    vocabulary: tl.tensor,
    rows: tl.tensor,
    ids: tl.tensor,
    biases: tl.tensor,
    told: tl.tensor,
    repetitions: tl.tensor,
    presences: tl.tensor,
    frequencies: tl.tensor,
    count: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    row = tl.load(rows + places, mask=inside, other=0)
    logit = logits + row.to(tl.int64) * vocabulary + tl.load(ids + places, mask=inside, other=0)
    value = tl.load(logit, mask=inside) + tl.load(biases + places, mask=inside)
    times = tl.load(told + places, mask=inside, other=-1)
    factor = tl.load(repetitions + row, mask=inside & (times >= 0), other=1.0)
    value = tl.where(value > 0, value / factor, value * factor)
    frequency = tl.load(frequencies + row, mask=inside & (times > 0), other=0.0)
    presence = tl.load(presences + row, mask=inside & (times > 0), other=0.0)
    tl.store(logit, value - (frequency * times + presence), mask=inside)


@triton.jit
def masked(
    source: tl.tensor, target: tl.tensor, words: tl.tensor, vocabulary: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    """Copy a row, and make impossible what has no bit in `words`; whether nothing is possible then. NaN stays."""
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
    places: tl.tensor,
    words: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64)
    place = tl.load(places + index).to(tl.int64)
    if place >= 0:
        target, bits = edited + index * vocabulary, words + place * width
        if masked(target, target, bits, vocabulary, BLOCK):
            source = logits + tl.load(sources + index).to(tl.int64) * stride
            masked(source, target, bits, vocabulary, BLOCK)


def shaped(logits: Tensor, rows: SamplingRows) -> Tensor:
    """The rows to be sampled, in their order, as their requests want them: float32 [rows, vocabulary].

    A row of which its grammar leaves nothing is as the model said, but for the grammar.
    """
    columns = rows.columns
    edited = logits.index_select(0, columns.sources)
    edits, (places, width) = len(columns.edit_ids), columns.words.shape
    if edits:
        _edit_kernel[(triton.cdiv(edits, EDITS),)](
            edited, edited.shape[1], columns.edit_rows, columns.edit_ids, columns.bias, columns.told,
            columns.repetition, columns.presence, columns.frequency, edits, BLOCK=EDITS,
        )  # fmt: skip
    if places:
        _mask_kernel[(len(edited),)](
            edited, logits, columns.sources, logits.stride(0), edited.shape[1], columns.places, columns.words, width,
            BLOCK=min(BLOCK, triton.next_power_of_2(edited.shape[1])), num_warps=8,
        )  # fmt: skip
    return edited


def left_of(edited: Tensor, rows: SamplingRows) -> Filters:
    """Leave top choices out of those of the rows that lose them, in place; the filters that are still to be applied."""
    hit, filters = rows.columns.left_out, rows.filters
    left = without_top_choices(edited[hit], filters.rows(hit), rows.columns.thresholds[:, None])
    edited.index_copy_(0, hit, left)
    return filters.lifted(hit, edited.shape[1])


def report_draws(drawn_from: Tensor, filters: Filters, rows: SamplingRows, told: SampledColumns) -> None:
    """Write what the draws were made from, in place of the model's own distribution, for the rows that report that.

    `drawn_from` are their logits, float32 [rows, vocabulary], and `filters` are theirs.
    """
    hit = rows.columns.drawn
    picked, ids, top = drawn_logprobs(drawn_from, filters, told.token_ids[hit], rows.alternatives or 0)
    told.picked.index_copy_(0, hit, picked.float())
    told.top_ids.index_copy_(0, hit, ids.int())
    told.top.index_copy_(0, hit, top.float())
