"""Drawing: the logits of a step, and one token for each row, by temperature and filters.

Filters keep a prefix of the tokens ordered from the most likely down, ties by id: min-p and top-k first, then top-p of
what they left. A draw inverts a cumulative distribution at a number the caller brings. The few dozen most likely
tokens mostly hold all that top-k and top-p keep, and only they are sorted. Where they do not, and where there is no
such filter, the whole vocabulary is drawn from as it lies, again if top-p drops the token. Refuses to know requests
and where its random numbers come from.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.grammar import Words
from engine.sampling_params import SamplingParams

PREFIXES = (64, 1024)  # tokens sorted before all: finding them takes 0.1 and 0.4 ms of 49,152, a sort 3.5 ms
ATTEMPTS = 4  # draws from the whole vocabulary before it is sorted: 0.2 ms each, and top-p drops few
NO_TOKEN = -1
SMALLEST_TEMPERATURE = 1e-30  # that float32 divides by without a NaN; all but the best are nothing long before


class Draw(Protocol):
    """Draws tokens of rows that have no filters, sooner than `engine.sampling.drawing` does."""

    def __call__(
        self,
        logits: Tensor,
        rows: Sequence[int],
        words: Words,
        mask_rows: Sequence[int],
        temperatures: Sequence[float],
        uniforms: Sequence[float],
    ) -> list[int]:
        """One token for each of some `rows` of float32 [rows, vocabulary], of what has a bit in the row of `words` at
        its mask row, -1: of all. Less than 0 where nothing of that is likely, or infinitely so."""
        ...


@dataclass(frozen=True, slots=True)
class Logits:
    """What a step computed, one row for each of the batch's logit rows. Valid until the device's next step."""

    buffer: Tensor  # float32 [rows or more, vocabulary]
    greedy: Sequence[int] | None = None  # the most likely token of each row, -1 where none is a number; None: not known
    rows: int | None = None  # None: all of the buffer
    draw: Draw | None = None  # None: the device has none of its own

    @property
    def values(self) -> Tensor:
        """float32 [rows, vocabulary]"""
        return self.buffer[: self.rows]


@dataclass(frozen=True, slots=True)
class Filters:
    """The filters of a batch as columns, [rows, 1]: the temperature float64, top_k int64, the others float32."""

    temperature: Tensor
    min_p: Tensor
    top_k: Tensor
    top_p: Tensor

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int) -> "Filters":
        return cls(
            temperature=torch.tensor([[p.temperature] for p in params], dtype=torch.float64),
            min_p=torch.tensor([[p.min_p] for p in params]),
            top_k=torch.tensor([[min(p.top_k or vocab_size, vocab_size)] for p in params]),
            top_p=torch.tensor([[p.top_p] for p in params]),
        )

    def rows(self, index: Tensor | slice | int) -> "Filters":
        return Filters(self.temperature[index], self.min_p[index], self.top_k[index], self.top_p[index])

    def without_filters(self, index: Tensor, vocab_size: int) -> "Filters":
        """The same, but that those of the rows at `index`, int64, keep every token."""
        return Filters(
            self.temperature,
            self.min_p.index_fill(0, index, 0.0),
            self.top_k.index_fill(0, index, vocab_size),
            self.top_p.index_fill(0, index, 1.0),
        )


def kept_weights(values: Tensor, filters: Filters) -> Tensor:
    """The weights of logits that are sorted from the most likely token down, float32 [rows, vocabulary]; 0 for what the
    filters drop. Returns float64 of the same shape."""
    weights = ((values.double() - values[:, :1]) / filters.temperature).exp()
    positions = torch.arange(values.shape[1], device=values.device)
    weights = torch.where((weights >= filters.min_p) & (positions < filters.top_k), weights, 0.0)
    before = (weights.cumsum(-1) - weights) / weights.sum(-1, keepdim=True)
    return torch.where((before < filters.top_p) | (positions == 0), weights, 0.0)


def sampled_logprobs(logits: Tensor, filters: Filters, token_ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The distributions that rows are drawn from, as natural-log probabilities; -inf for what the filters drop.

    logits float32 [rows, vocabulary], token_ids int64 [rows]. Returns those of the tokens, float64 [rows]; the ids of
    the `count` most likely tokens, int64 [rows, count]; and theirs, float64 of the same shape.
    """
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    is_greedy = filters.temperature == 0
    one = Filters(
        torch.where(is_greedy, 1.0, filters.temperature),
        filters.min_p,
        torch.where(is_greedy, 1, filters.top_k),
        filters.top_p,
    )
    weights = kept_weights(values, one)
    logprobs = (weights / weights.sum(-1, keepdim=True)).log()
    positions = (ids == token_ids[:, None]).int().argmax(-1, keepdim=True)
    return logprobs.gather(-1, positions).squeeze(-1), ids[:, :count], logprobs[:, :count]


def draw(logits: Tensor, filters: Filters, uniforms: Tensor) -> Tensor:
    """One token a row of `logits` (float32 [rows, vocabulary]) at `uniforms` (float64 [rows, ATTEMPTS], in [0, 1)).

    Returns int64 [rows]. What a row draws depends on nothing but the row.
    """
    vocabulary = logits.shape[1]
    drawn = torch.full((len(logits),), NO_TOKEN)
    unsorted = ((filters.top_k >= vocabulary) & (filters.top_p >= 1)).flatten()
    for prefix in (*(p for p in PREFIXES if p < vocabulary), vocabulary):
        if (drawn != NO_TOKEN).all():
            break
        left = ((drawn == NO_TOKEN) & ~unsorted).nonzero().flatten()
        if len(left):
            rows = left if len(left) < len(logits) else slice(None)  # which copies nothing
            drawn[left] = draw_among(logits[rows], filters.rows(rows), uniforms[rows, :1], prefix)
        for row in ((drawn == NO_TOKEN) & (filters.top_k >= vocabulary).flatten()).nonzero().flatten().tolist():
            drawn[row] = _draw_unsorted(logits[row], filters.rows(row), uniforms[row])
    return drawn


def draw_among(logits: Tensor, filters: Filters, uniforms: Tensor, prefix: int) -> Tensor:
    """What each row draws, int64 [rows]; NO_TOKEN where its `prefix` most likely tokens do not hold all that is kept.

    With the whole vocabulary as the prefix they do, or with all of it that is possible.
    """
    values, ids = most_likely(logits, prefix)
    whole = (values[:, -1:] == -torch.inf) | (prefix == logits.shape[1])  # of what is possible at all
    # Which of several tokens as likely as the last one are here is not said: they are left out, however many they are.
    known = whole | (values > values[:, -1:])
    # Distances from the best are 0 or less, so that however small the temperature, nothing but -inf comes of it.
    weights = ((values.double() - values[:, :1]) / filters.temperature).exp()
    kept = known & (weights >= filters.min_p) & (torch.arange(prefix) < filters.top_k)
    weights = torch.where(kept, weights, 0.0)
    found, counts = known.sum(-1, keepdim=True), kept.sum(-1, keepdim=True)
    ended = (counts < found) | (filters.top_k <= found) | whole  # where min-p and top-k keep nothing beyond
    settled = ended | (filters.top_k >= logits.shape[1])  # whether the weight of what they keep is known
    total = torch.where(ended, weights.sum(-1, keepdim=True), _total(logits, filters, ended))
    within = kept & ((weights.cumsum(-1) - weights) / total < filters.top_p)
    within[:, 0] = True
    counts = within.sum(-1, keepdim=True)
    cumulative = torch.where(within, weights, 0.0).cumsum(-1)
    position = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
    token_ids = ids.gather(-1, torch.minimum(position, counts - 1))
    return torch.where(settled & (ended | (counts < found)), token_ids, NO_TOKEN).squeeze(-1)


def _draw_unsorted(logits: Tensor, filters: Filters, uniforms: Tensor) -> int:
    """What one row draws without top-k; NO_TOKEN where top-p drops all tries."""
    weights = _weights(logits, filters)
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[-1]
    # A number below 1 times the total rounds to less than the total: what it falls on weighs something.
    for position in torch.searchsorted(cumulative, uniforms * total, right=True).tolist():
        if filters.top_p >= 1 or _weight_before(weights, position) / total < filters.top_p:
            return int(position)
    return NO_TOKEN


def _weight_before(weights: Tensor, token_id: int) -> Tensor:
    """Of the tokens more likely than `token_id`, and of those as likely with a lower id."""
    weight = weights[token_id]
    ties = (weights[:token_id] == weight).sum() * weight.double()
    return torch.where(weights > weight, weights, 0.0).sum(dtype=torch.float64) + ties


def most_likely(logits: Tensor, prefix: int) -> tuple[Tensor, Tensor]:
    """The `prefix` most likely tokens of each row from the most likely down, ties by id: values and ids."""
    if prefix == logits.shape[1]:
        values, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
        return values, ids
    # Sorted by id first, so that the stable sort by value keeps ties in that order.
    ids = _candidates(logits, prefix)
    ids = ids.gather(-1, logits.gather(-1, ids).topk(prefix, sorted=False).indices).sort(dim=-1).values
    values, order = torch.sort(logits.gather(-1, ids), dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)


def _candidates(logits: Tensor, prefix: int) -> Tensor:
    """Ids among which the `prefix` most likely tokens of each row are; of those as likely as the last, as many as it
    takes. In columns of the vocabulary cut into parts, they are where the largest of a column is among the largest."""
    vocabulary = logits.shape[1]
    parts = math.isqrt(vocabulary // prefix)
    width = vocabulary // parts
    largest = logits[:, : parts * width].view(len(logits), parts, width).amax(1)
    columns = largest.topk(prefix, sorted=False).indices
    ids = (columns[:, None] + width * torch.arange(parts)[:, None]).flatten(1)
    return torch.cat([ids, torch.arange(parts * width, vocabulary).expand(len(ids), -1)], -1)


def _total(logits: Tensor, filters: Filters, ended: Tensor) -> Tensor:
    """The weight of all tokens that pass min-p, the most likely one's being 1; float64 [rows, 1].

    The vocabulary is read for the rows only whose filters did not end.
    """
    totals = torch.ones(ended.shape, dtype=torch.float64)
    for row in (~ended).flatten().nonzero().flatten().tolist():
        totals[row] = _weights(logits[row], filters.rows(row)).sum(dtype=torch.float64)
    return totals


def _weights(logits: Tensor, filters: Filters) -> Tensor:
    """Of one row, the most likely token's being 1, nothing where min-p drops a token; float32 [vocabulary]."""
    distances = logits - logits.amax()
    weights = distances.div_(float(filters.temperature.clamp(min=SMALLEST_TEMPERATURE))).exp_()
    return weights if filters.min_p == 0 else torch.where(weights >= filters.min_p, weights, 0.0)
