"""Drawing: hold the logits of a step, and sample one token per row by temperature and filters.

Filters keep a prefix of the tokens in descending order of probability, ties by id: first min-p and top-k, then top-p
among the tokens that are left. A draw inverts the cumulative distribution at a uniform number that the caller passes.
Usually the few dozen most likely tokens include all that top-k and top-p keep, and only those are sorted. Otherwise, or
without such a filter, the row draws from the unsorted vocabulary, and draws again if top-p drops the token.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.grammar import Words
from engine.sampling_params import SamplingParams

# Numbers of most likely tokens to sort first. In a row of 49,152 tokens, selecting 64 takes 0.1 ms, selecting 1024
# takes 0.4 ms, and a full sort takes 3.5 ms.
PREFIXES = (64, 1024)
# number of draws from the unsorted vocabulary before it is sorted; each takes 0.2 ms, and top-p drops few tokens
ATTEMPTS = 4
NO_TOKEN = -1
# smallest divisor in float32 that gives no NaN; with much larger ones, only the most likely tokens already have any
# weight
SMALLEST_TEMPERATURE = 1e-30


class Draw(Protocol):
    """A device's sampler for rows without filters, which is faster than this module."""

    def __call__(
        self,
        logits: Tensor,
        rows: Sequence[int],
        words: Words,
        mask_rows: Sequence[int],
        temperatures: Sequence[float],
        uniforms: Sequence[float],
    ) -> list[int]:
        """Sample one token for each row in `rows` of float32 logits [rows, vocabulary].

        `mask_rows` are indices into `words`, whose bits mark the allowed tokens; -1: all are allowed. The result is
        negative for a row whose allowed tokens all have probability 0, or whose logits are infinite.
        """
        ...


@dataclass(frozen=True, slots=True)
class Logits:
    """The logits of a step, one row for each position that needs logits. Valid until the device's next step."""

    buffer: Tensor  # float32 [rows or more, vocabulary]
    greedy: Sequence[int] | None = None  # most likely token of each row; -1 for a row of NaN; None: not computed
    rows: int | None = None  # number of rows in use; None: all rows of the buffer
    draw: Draw | None = None  # sampler of the device; None: it has none

    @property
    def values(self) -> Tensor:
        """The logits as float32 [rows, vocabulary]."""
        return self.buffer[: self.rows]


@dataclass(frozen=True, slots=True)
class Filters:
    """The filters of a batch as columns, [rows, 1]: temperature is float64, top_k int64, and the others are float32."""

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
        """Return a copy in which the filters of the rows at `index`, int64, are disabled."""
        return Filters(
            self.temperature,
            self.min_p.index_fill(0, index, 0.0),
            self.top_k.index_fill(0, index, vocab_size),
            self.top_p.index_fill(0, index, 1.0),
        )


def kept_weights(values: Tensor, filters: Filters) -> Tensor:
    """Return the weights of sorted logits as float64, with 0 for tokens that the filters drop.

    `values` is float32 [rows, vocabulary], most likely first.
    """
    weights = ((values.double() - values[:, :1]) / filters.temperature).exp()
    positions = torch.arange(values.shape[1], device=values.device)
    weights = torch.where((weights >= filters.min_p) & (positions < filters.top_k), weights, 0.0)
    before = (weights.cumsum(-1) - weights) / weights.sum(-1, keepdim=True)
    return torch.where((before < filters.top_p) | (positions == 0), weights, 0.0)


def sampled_logprobs(logits: Tensor, filters: Filters, token_ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return natural-log probabilities under the distribution that rows are sampled from; -inf for dropped tokens.

    `logits` is float32 [rows, vocabulary], `token_ids` int64 [rows]. Returns the log-probabilities of `token_ids`,
    float64 [rows]; the ids of the `count` most likely tokens, int64 [rows, count]; and their log-probabilities, float64
    of the same shape.
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
    """Sample one token per row of `logits`, float32 [rows, vocabulary]. Returns int64 [rows].

    `uniforms` is float64 [rows, ATTEMPTS], in [0, 1). The result of a row depends only on that row.
    """
    vocabulary = logits.shape[1]
    drawn = torch.full((len(logits),), NO_TOKEN)
    unsorted = ((filters.top_k >= vocabulary) & (filters.top_p >= 1)).flatten()
    for prefix in (*(p for p in PREFIXES if p < vocabulary), vocabulary):
        if (drawn != NO_TOKEN).all():
            break
        left = ((drawn == NO_TOKEN) & ~unsorted).nonzero().flatten()
        if len(left):
            rows = left if len(left) < len(logits) else slice(None)  # a slice copies nothing
            drawn[left] = draw_among(logits[rows], filters.rows(rows), uniforms[rows, :1], prefix)
        for row in ((drawn == NO_TOKEN) & (filters.top_k >= vocabulary).flatten()).nonzero().flatten().tolist():
            drawn[row] = _draw_unsorted(logits[row], filters.rows(row), uniforms[row])
    return drawn


def draw_among(logits: Tensor, filters: Filters, uniforms: Tensor, prefix: int) -> Tensor:
    """Sample each row from its `prefix` most likely tokens. Returns int64 [rows].

    The result is NO_TOKEN if the prefix does not contain all tokens that the filters keep. This cannot happen if
    `prefix` is the whole vocabulary.
    """
    values, ids = most_likely(logits, prefix)
    # whether the prefix contains all tokens with a probability above 0
    whole = (values[:, -1:] == -torch.inf) | (prefix == logits.shape[1])
    # The prefix contains an arbitrary selection of the tokens that are as likely as its last one, so none of those are
    # used.
    known = whole | (values > values[:, -1:])
    # Distances from the largest logit are at most 0, so a tiny temperature gives at worst -inf, which has weight 0.
    weights = ((values.double() - values[:, :1]) / filters.temperature).exp()
    kept = known & (weights >= filters.min_p) & (torch.arange(prefix) < filters.top_k)
    weights = torch.where(kept, weights, 0.0)
    found, counts = known.sum(-1, keepdim=True), kept.sum(-1, keepdim=True)
    # whether min-p and top-k keep no token outside the prefix
    ended = (counts < found) | (filters.top_k <= found) | whole
    # whether the total weight of the tokens that min-p and top-k keep is known
    settled = ended | (filters.top_k >= logits.shape[1])
    total = torch.where(ended, weights.sum(-1, keepdim=True), _total(logits, filters, ended))
    within = kept & ((weights.cumsum(-1) - weights) / total < filters.top_p)
    within[:, 0] = True
    counts = within.sum(-1, keepdim=True)
    cumulative = torch.where(within, weights, 0.0).cumsum(-1)
    position = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
    token_ids = ids.gather(-1, torch.minimum(position, counts - 1))
    return torch.where(settled & (ended | (counts < found)), token_ids, NO_TOKEN).squeeze(-1)


def _draw_unsorted(logits: Tensor, filters: Filters, uniforms: Tensor) -> int:
    """Sample one row without top-k from the unsorted vocabulary. Returns NO_TOKEN if top-p drops the token of every
    attempt.
    """
    weights = _weights(logits, filters)
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[-1]
    # A uniform number is below 1, so its product with the total rounds to less than the total, and the token has a
    # weight above 0.
    for position in torch.searchsorted(cumulative, uniforms * total, right=True).tolist():
        if filters.top_p >= 1 or _weight_before(weights, position) / total < filters.top_p:
            return int(position)
    return NO_TOKEN


def _weight_before(weights: Tensor, token_id: int) -> Tensor:
    """Return the total weight of the tokens before `token_id` in sorted order: more likely, or as likely with a lower
    id.
    """
    weight = weights[token_id]
    ties = (weights[:token_id] == weight).sum() * weight.double()
    return torch.where(weights > weight, weights, 0.0).sum(dtype=torch.float64) + ties


def most_likely(logits: Tensor, prefix: int) -> tuple[Tensor, Tensor]:
    """Return the values and ids of the `prefix` most likely tokens of each row, most likely first, ties by id."""
    if prefix == logits.shape[1]:
        values, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
        return values, ids
    # The ids are sorted first, so that the stable sort by value orders ties by id.
    ids = _candidates(logits, prefix)
    ids = ids.gather(-1, logits.gather(-1, ids).topk(prefix, sorted=False).indices).sort(dim=-1).values
    values, order = torch.sort(logits.gather(-1, ids), dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)


def _candidates(logits: Tensor, prefix: int) -> Tensor:
    """Return ids that include the `prefix` most likely tokens of each row, and enough of those tied with the last one.

    The vocabulary is divided into parts of equal width. A column has one token of each part. The most likely tokens are
    in the `prefix` columns with the largest maxima.
    """
    vocabulary = logits.shape[1]
    parts = math.isqrt(vocabulary // prefix)
    width = vocabulary // parts
    largest = logits[:, : parts * width].view(len(logits), parts, width).amax(1)
    columns = largest.topk(prefix, sorted=False).indices
    ids = (columns[:, None] + width * torch.arange(parts)[:, None]).flatten(1)
    return torch.cat([ids, torch.arange(parts * width, vocabulary).expand(len(ids), -1)], -1)


def _total(logits: Tensor, filters: Filters, ended: Tensor) -> Tensor:
    """Return the total weight of all tokens that pass min-p, relative to the most likely one. float64 [rows, 1].

    Reads the vocabulary only for rows that are false in `ended`; the others get 1.
    """
    totals = torch.ones(ended.shape, dtype=torch.float64)
    for row in (~ended).flatten().nonzero().flatten().tolist():
        totals[row] = _weights(logits[row], filters.rows(row)).sum(dtype=torch.float64)
    return totals


def _weights(logits: Tensor, filters: Filters) -> Tensor:
    """Return the weights of one row relative to its most likely token, with 0 for tokens that min-p drops.

    The result is float32 [vocabulary].
    """
    distances = logits - logits.amax()
    weights = distances.div_(float(filters.temperature.clamp(min=SMALLEST_TEMPERATURE))).exp_()
    return weights if filters.min_p == 0 else torch.where(weights >= filters.min_p, weights, 0.0)
