"""Inputs and results of the sampling kernels: columns in one buffer, so that one copy transfers all of them.

`build_rows` creates the inputs from requests, and `to_sampled_tokens` converts the results, both on the host.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from engine.kernels.columns import extent, views
from engine.request import Request, TokenLogprobs
from engine.sampling.drawing import ATTEMPTS, Filters
from engine.sampling.filters import dry_penalties, token_array, xtc_applies
from engine.sampling.masks import NO_MASKS, Masks, TokenPosition
from engine.sampling.sampler import NOT_NUMBERS, uniform
from engine.step import SampledToken

UNSEEN = -1
NOT_A_NUMBER = -1  # replaces the token id if the model computed NaN
NO_TOKEN = -1  # pads the alternatives if fewer tokens are possible


@dataclass(frozen=True, slots=True)
class SampleTarget:
    """One token to sample for a request."""

    source: int  # index of its row in the logits
    request: Request
    index: int  # index of the token in the reply, counting tokens that a running step has yet to sample

    @property
    def position(self) -> TokenPosition:
        """The request and the index of the token in its reply."""
        return self.request.id, self.index


class Draws(NamedTuple):
    """The parameters of a draw in each of R rows. At temperature 0, the most likely token is drawn."""

    uniforms: Tensor  # float64 [R, ATTEMPTS], in [0, 1)
    temperature: Tensor  # float32 [R]
    min_p: Tensor  # float32 [R]
    top_k: Tensor  # int32 [R], 1 .. vocabulary
    top_p: Tensor  # float32 [R]
    sources: Tensor  # int32 [R]: row of the logits


class Columns(NamedTuple):
    """Sampling parameters of R rows, with E edits of logits, X rows that use XTC, and the masks of grammars.

    An edit changes the logit of one token in one row before sampling; each token appears at most once per row. Masks
    are as in `engine.sampling.masks.Masks`.
    """

    uniforms: Tensor  # float64 [R, ATTEMPTS], in [0, 1)
    temperature: Tensor  # float32 [R]; 0: greedy
    min_p: Tensor  # float32 [R]
    top_k: Tensor  # int32 [R], 1 .. vocabulary
    top_p: Tensor  # float32 [R]
    repetition: Tensor  # float32 [R]: penalty; 1: none
    presence: Tensor  # float32 [R]
    frequency: Tensor  # float32 [R]
    # int32 [R]: number of log-probabilities to report besides the sampled token's; -1: report none
    alternatives: Tensor
    sources: Tensor  # int32 [R]: row of the logits
    mask_rows: Tensor  # int32 [R]: row of `words`; -1: no grammar
    edit_rows: Tensor  # int32 [E]: row of each edit
    edit_ids: Tensor  # int32 [E]: token of each edit
    bias: Tensor  # float32 [E]: bias added before penalties; -inf forbids the token
    # int32 [E]: occurrences of the token in the reply; 0: only in the prompt; UNSEEN: penalties do not apply
    counts: Tensor
    xtc_rows: Tensor  # int64 [X]: rows that use XTC
    xtc_thresholds: Tensor  # float32 [X]: minimum probability of a top choice
    words: Tensor  # int32 [masks, ceil(vocabulary / 32)]: one bit per token, 1 if it is allowed
    drawn: Tensor  # int64 [D]: rows that report the distribution drawn from instead of the model's own

    @property
    def draws(self) -> Draws:
        return Draws(self.uniforms, self.temperature, self.min_p, self.top_k, self.top_p, self.sources)


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The sampling parameters of rows: columns over one buffer, and a summary for the host."""

    buffer: Tensor  # uint8 [bytes]
    columns: Columns
    # maximum number of alternatives that a row reports; None: no row reports log-probabilities
    alternatives: int | None

    @property
    def filters(self) -> Filters:
        columns = self.columns
        temperature = columns.temperature[:, None].double()
        return Filters(temperature, columns.min_p[:, None], columns.top_k[:, None], columns.top_p[:, None])

    def over(self, buffer: Tensor) -> Self:
        """Return the same columns over another buffer, on any device.

        `buffer` must start with a copy of this buffer's bytes before the columns are read.
        """
        return replace(self, buffer=buffer, columns=Columns._make(views(buffer, self.columns)))

    def to(self, device: torch.device) -> Self:
        return self.over(self.buffer.to(device, non_blocking=True))


class SampledColumns(NamedTuple):
    """The sampling results of R rows.

    If no row requests log-probabilities, the last three columns are empty. Entries that a row did not request are
    undefined.
    """

    token_ids: Tensor  # int64 [R]; NOT_A_NUMBER if the model computed NaN
    # float32 [R]: natural logarithm of the token's probability, under the model's distribution or the one drawn from
    token_logprobs: Tensor
    top_ids: Tensor  # int32 [R, alternatives], most likely first; NO_TOKEN if fewer tokens are possible
    top: Tensor  # float32 [R, alternatives]: log-probabilities of `top_ids`


@dataclass(frozen=True, slots=True)
class Sampled:
    """Sampled tokens, as columns over one buffer."""

    buffer: Tensor  # uint8 [bytes]
    columns: SampledColumns

    @classmethod
    def blank(cls, rows: int, alternatives: int | None, device: torch.device) -> Self:
        """Allocate uninitialized results for a number of rows; `alternatives` as in `SamplingRows`."""
        reports, width = (0, 0) if alternatives is None else (rows, alternatives)
        shapes = (
            torch.empty(rows, dtype=torch.int64, device="meta"),
            torch.empty(reports, device="meta"),
            torch.empty(reports, width, dtype=torch.int32, device="meta"),
            torch.empty(reports, width, device="meta"),
        )
        buffer = torch.empty(extent(shapes), dtype=torch.uint8, device=device)
        return cls(buffer, SampledColumns._make(views(buffer, shapes)))

    @classmethod
    def of(cls, token_ids: Tensor) -> Self:
        """Return results with these tokens, int64 [rows], and no log-probabilities."""
        empty = cls.blank(0, None, token_ids.device).columns
        return cls(token_ids.view(torch.uint8), empty._replace(token_ids=token_ids))

    def over(self, buffer: Tensor) -> Self:
        """Return the same columns over another buffer, on the host.

        `buffer` must start with a copy of this buffer's bytes before the columns are read.
        """
        return replace(self, buffer=buffer, columns=SampledColumns._make(views(buffer, self.columns)))


def needs_reply(request: Request) -> bool:
    """Whether sampling a token needs all previous tokens on the host, so that its step cannot be launched ahead."""
    return request.constraint is not None or request.params.needs_reply


def is_plain(target: SampleTarget) -> bool:
    """Whether a draw from the model's own logits gives the token, and no log-probabilities are reported."""
    params = target.request.params
    shaped = params.logit_bias or target.index < params.min_tokens or xtc_applies(params, target.index)
    return params.logprobs is None and not shaped and not needs_reply(target.request)


def build_draws(targets: Sequence[SampleTarget], vocabulary: int) -> Draws:
    """Build the draws of targets on the host, in order."""
    params = [target.request.params for target in targets]
    return Draws(
        uniforms=torch.tensor([_uniforms(target) for target in targets], dtype=torch.float64),
        temperature=_floats(p.temperature for p in params),
        min_p=_floats(p.min_p for p in params),
        top_k=torch.tensor([min(p.top_k or vocabulary, vocabulary) for p in params], dtype=torch.int32),
        top_p=_floats(p.top_p for p in params),
        sources=torch.tensor([target.source for target in targets], dtype=torch.int32),
    )


def build_rows(targets: Sequence[SampleTarget], vocabulary: int, masks: Masks = NO_MASKS) -> SamplingRows:
    """Build the sampling rows on the host, in the order of `targets`.

    Raises ValueError if penalties need reply tokens that are not known yet (see `needs_reply`), and IndexError for a
    token id outside the vocabulary.
    """
    params = [target.request.params for target in targets]
    edits = [_edits(row, target, vocabulary) for row, target in enumerate(targets)]
    xtc_rows = [row for row, target in enumerate(targets) if xtc_applies(target.request.params, target.index)]
    alternatives = [-1 if p.logprobs is None else p.logprobs for p in params]
    drawn = [row for row, p in enumerate(params) if p.drawn_logprobs and p.logprobs is not None]
    columns = Columns(
        **build_draws(targets, vocabulary)._asdict(),
        repetition=_floats(p.repetition_penalty for p in params),
        presence=_floats(p.presence_penalty for p in params),
        frequency=_floats(p.frequency_penalty for p in params),
        alternatives=torch.tensor(alternatives, dtype=torch.int32),
        mask_rows=torch.tensor([masks.mask_rows.get(target.position, -1) for target in targets], dtype=torch.int32),
        edit_rows=torch.cat([edit.rows for edit in edits]),
        edit_ids=torch.cat([edit.ids for edit in edits]),
        bias=torch.cat([edit.bias for edit in edits]),
        counts=torch.cat([edit.counts for edit in edits]),
        xtc_rows=torch.tensor(xtc_rows, dtype=torch.int64),
        xtc_thresholds=_floats(params[row].xtc_threshold for row in xtc_rows),
        words=torch.from_numpy(masks.words if masks.mask_rows else NO_MASKS.words),
        drawn=torch.tensor(drawn, dtype=torch.int64),
    )
    most = max(alternatives)
    return _packed(columns, None if most < 0 else most)


def _floats(values: Iterable[float]) -> Tensor:
    """Return float32 also for integers, such as a temperature of 1: other types would select other kernels."""
    return torch.tensor(list(values), dtype=torch.float32)


def _packed(columns: Columns, alternatives: int | None) -> SamplingRows:
    buffer = torch.zeros(extent(columns), dtype=torch.uint8)
    rows = SamplingRows(buffer, Columns._make(views(buffer, columns)), alternatives)
    for place, column in zip(rows.columns, columns, strict=True):
        place.copy_(column)
    return rows


def to_sampled_tokens(sampled: Sampled, targets: Sequence[SampleTarget], masks: Masks = NO_MASKS) -> list[SampledToken]:
    """Convert results on the host to one token or problem per target. Pass the `targets` of `build_rows`."""
    ids = sampled.columns.token_ids.tolist()
    reports = _reports(sampled.columns, ids, targets)
    return [_to_sampled_token(*found, masks) for found in zip(targets, ids, reports, strict=True)]


def _to_sampled_token(target: SampleTarget, token_id: int, report: TokenLogprobs | None, masks: Masks) -> SampledToken:
    if (failed := masks.failure(target.request.id)) is not None:
        return failed
    if token_id == NOT_A_NUMBER:
        return SampledToken(target.request.id, None, problem=NOT_NUMBERS)
    return SampledToken(target.request.id, token_id, report)


def _reports(
    columns: SampledColumns, ids: Sequence[int], targets: Sequence[SampleTarget]
) -> list[TokenLogprobs | None]:
    wanted = [target.request.params.logprobs for target in targets]
    if all(count is None for count in wanted):
        return [None] * len(targets)
    token_logprobs, top_ids, top = columns.token_logprobs.tolist(), columns.top_ids.tolist(), columns.top.tolist()
    return [
        None
        if count is None
        else TokenLogprobs(ids[row], token_logprobs[row], _top(top_ids[row][:count], top[row][:count]))
        for row, count in enumerate(wanted)
    ]


def _top(ids: Sequence[int], logprobs: Sequence[float]) -> tuple[tuple[int, float], ...]:
    return tuple((token_id, logprob) for token_id, logprob in zip(ids, logprobs, strict=True) if token_id != NO_TOKEN)


def _uniforms(target: SampleTarget) -> list[float]:
    params = target.request.params
    if params.temperature == 0:
        return [0.0] * ATTEMPTS
    return [uniform(params.seed, target.index, attempt) for attempt in range(ATTEMPTS)]


class _Edits(NamedTuple):
    """Edits of one row, as in `Columns`."""

    rows: Tensor
    ids: Tensor
    bias: Tensor
    counts: Tensor


_NO_IDS, _NO_BIAS = torch.empty(0, dtype=torch.int32), torch.empty(0)
_NONE = _Edits(_NO_IDS, _NO_IDS, _NO_BIAS, _NO_IDS)


def _edits(row: int, target: SampleTarget, vocabulary: int) -> _Edits:
    """Return the edits of one row. Biases and DRY penalties of the same token are summed."""
    request, params = target.request, target.request.params
    if params.needs_reply and len(request.output_ids) != target.index:
        raise ValueError(f"penalties of token {target.index} of a reply need all tokens before it")
    biases: dict[int, float] = {}
    for token_id, value in (*params.logit_bias, *((i, -cost) for i, cost in dry_penalties(request).items())):
        biases[token_id] = biases.get(token_id, 0.0) + value
    if target.index < params.min_tokens:
        biases |= dict.fromkeys((*request.end_ids, *params.stop_token_ids), -np.inf)
    if not biases and not params.penalizes:
        return _NONE
    if biases and not 0 <= min(biases) <= max(biases) < vocabulary:
        raise IndexError(f"a token id is not in the vocabulary of {vocabulary} tokens")
    bias = np.zeros(vocabulary, np.float32)
    bias[list(biases)] = list(biases.values())
    counts = _reply_counts(target, vocabulary)
    ids = np.flatnonzero((bias != 0) | (counts != UNSEEN))
    return _Edits(
        torch.full((len(ids),), row, dtype=torch.int32),
        torch.from_numpy(ids.astype(np.int32)),
        torch.from_numpy(bias[ids]),
        torch.from_numpy(counts[ids]),
    )


def _reply_counts(target: SampleTarget, vocabulary: int) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    """Return the number of occurrences of each token of the vocabulary, as in `Columns.counts`."""
    counts = np.full(vocabulary, UNSEEN, np.int32)
    if target.request.params.penalizes:
        known = np.frombuffer(token_array(target.request), np.int64)
        counts[known] = 0
        reply = known[len(target.request.prompt_ids) :]
        counts[reply] = np.bincount(reply, minlength=vocabulary)[reply]
    return counts
