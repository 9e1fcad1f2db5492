"""What rows of logits are sampled by, and what was sampled, as a device takes and gives it: columns of numbers in one
buffer, which one copy moves.

`rows_of` makes the first from requests, `told` makes words of the second, both on the host. Refuses to know kernels,
and when buffers are copied.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from engine.request import Request, TokenLogprobs
from engine.sampling.drawing import TRIES, Filters
from engine.sampling.filters import dry_penalties, known_ids, leaves_out
from engine.sampling.masks import NO_MASKS, Masks
from engine.sampling.sampler import NOT_NUMBERS, uniform
from engine.step import SampledToken

ALIGNMENT = 16  # bytes: what kernels load in one piece
UNSEEN = -1
NOT_A_NUMBER = -1  # in place of a token id, where the model computed NaN
NO_TOKEN = -1  # among alternatives, where fewer tokens are possible


@dataclass(frozen=True, slots=True)
class Pick:
    """A token to be picked."""

    source: int  # row of the logits
    request: Request
    index: int  # tokens of the reply before it, those included that a step under way is still to sample


class Columns(NamedTuple):
    """R rows; E edits: the tokens whose logits change before anything is picked, each once in a row; X rows that top
    choices are left out of; and the masks of grammars, as in `engine.sampling.masks.Masks`."""

    uniforms: Tensor  # float64 [R, TRIES], in [0, 1)
    temperature: Tensor  # float32 [R]; 0: the most likely token
    min_p: Tensor  # float32 [R]
    top_k: Tensor  # int32 [R], 1 .. vocabulary
    top_p: Tensor  # float32 [R]
    repetition: Tensor  # float32 [R]; 1: no penalty
    presence: Tensor  # float32 [R]
    frequency: Tensor  # float32 [R]
    alternatives: Tensor  # int32 [R]: to be reported beside the picked token; -1: nothing is
    sources: Tensor  # int32 [R]: rows of the logits
    places: Tensor  # int32 [R]: rows of `words`; -1: no grammar
    edit_rows: Tensor  # int32 [E]
    edit_ids: Tensor  # int32 [E]
    bias: Tensor  # float32 [E]: added first; -inf forbids the token
    told: Tensor  # int32 [E]: how often the reply has the token; 0: the prompt alone; UNSEEN: penalties do not apply
    left_out: Tensor  # int64 [X]: rows
    thresholds: Tensor  # float32 [X]: how likely such a choice is
    words: Tensor  # int32 [masks, ceil(vocabulary / 32)]: bits of the tokens that may come
    drawn: Tensor  # int64 [D]: rows that report what they are drawn from, in place of the model's own distribution


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How rows are sampled: columns over one buffer, and what the host must know of them."""

    buffer: Tensor  # uint8 [bytes]
    columns: Columns
    plain: bool  # the most likely token of every row, and no more
    alternatives: int | None  # the most that any row reports; None: none reports anything

    @property
    def filters(self) -> Filters:
        columns = self.columns
        temperature = columns.temperature[:, None].double()
        return Filters(temperature, columns.min_p[:, None], columns.top_k[:, None], columns.top_p[:, None])

    def over(self, buffer: Tensor) -> Self:
        """The same over a buffer that holds, or will hold, a copy of this one's bytes at its start; on any device."""
        return replace(self, buffer=buffer, columns=Columns._make(views(buffer, self.columns)))

    def to(self, device: torch.device) -> Self:
        return self.over(self.buffer.to(device, non_blocking=True))


class SampledColumns(NamedTuple):
    """R rows. Where nobody asks for log-probabilities, the last three are empty; where a row does not, or asks for
    fewer alternatives than others, there may be anything."""

    token_ids: Tensor  # int64 [R]; NOT_A_NUMBER where the model computed NaN
    picked: Tensor  # float32 [R]: the natural-log probability of the token, by the model alone or of the draw
    top_ids: Tensor  # int32 [R, alternatives], most likely first; NO_TOKEN where fewer tokens are possible
    top: Tensor  # float32 [R, alternatives]: their log-probabilities


@dataclass(frozen=True, slots=True)
class Sampled:
    """What was sampled: columns over one buffer."""

    buffer: Tensor  # uint8 [bytes]
    columns: SampledColumns

    @classmethod
    def blank(cls, rows: int, alternatives: int | None, device: torch.device) -> Self:
        """Room for what so many rows give; `alternatives` as in `SamplingRows`."""
        reports, width = (0, 0) if alternatives is None else (rows, alternatives)
        shapes = (
            torch.empty(rows, dtype=torch.int64, device="meta"),
            torch.empty(reports, device="meta"),
            torch.empty(reports, width, dtype=torch.int32, device="meta"),
            torch.empty(reports, width, device="meta"),
        )
        buffer = torch.empty(extent(shapes), dtype=torch.uint8, device=device)
        return cls(buffer, SampledColumns._make(views(buffer, shapes)))

    def over(self, buffer: Tensor) -> Self:
        """The same over a buffer that holds, or will hold, a copy of this one's bytes at its start: the host's."""
        return replace(self, buffer=buffer, columns=SampledColumns._make(views(buffer, self.columns)))


def extent(tensors: Iterable[Tensor]) -> int:
    """Bytes of a buffer for tensors like these."""
    return sum(_padded(it.nbytes) for it in tensors)


def views(buffer: Tensor, tensors: Iterable[Tensor]) -> list[Tensor]:
    """Tensors of these types and shapes, one behind another in `buffer`, uint8 [bytes]."""
    found, start = [], 0
    for it in tensors:
        found.append(buffer[start : start + it.nbytes].view(it.dtype).view(it.shape))
        start += _padded(it.nbytes)
    return found


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def needs_reply(request: Request) -> bool:
    """Whether a token is picked only when the host knows all before it, so that no step of it is launched ahead."""
    return request.constraint is not None or request.params.needs_reply


def rows_of(picks: Sequence[Pick], vocabulary: int, masks: Masks = NO_MASKS) -> SamplingRows:
    """Rows in the order of `picks`, on the host. Raises ValueError where penalties need tokens of a reply that are not
    known (see `needs_reply`), and IndexError for a token id outside the vocabulary."""
    params = [pick.request.params for pick in picks]
    edits = [_edits(row, pick, vocabulary) for row, pick in enumerate(picks)]
    left_out = [row for row, pick in enumerate(picks) if leaves_out(pick.request.params, pick.index)]
    alternatives = [-1 if p.logprobs is None else p.logprobs for p in params]
    drawn = [row for row, p in enumerate(params) if p.drawn_logprobs and p.logprobs is not None]
    columns = Columns(
        uniforms=torch.tensor([_uniforms(pick) for pick in picks], dtype=torch.float64),
        temperature=torch.tensor([p.temperature for p in params]),
        min_p=torch.tensor([p.min_p for p in params]),
        top_k=torch.tensor([min(p.top_k or vocabulary, vocabulary) for p in params], dtype=torch.int32),
        top_p=torch.tensor([p.top_p for p in params]),
        repetition=torch.tensor([p.repetition_penalty for p in params]),
        presence=torch.tensor([p.presence_penalty for p in params]),
        frequency=torch.tensor([p.frequency_penalty for p in params]),
        alternatives=torch.tensor(alternatives, dtype=torch.int32),
        sources=torch.tensor([pick.source for pick in picks], dtype=torch.int32),
        places=torch.tensor([masks.places.get(pick.request.id, -1) for pick in picks], dtype=torch.int32),
        edit_rows=torch.cat([edit.rows for edit in edits]),
        edit_ids=torch.cat([edit.ids for edit in edits]),
        bias=torch.cat([edit.bias for edit in edits]),
        told=torch.cat([edit.told for edit in edits]),
        left_out=torch.tensor(left_out, dtype=torch.int64),
        thresholds=torch.tensor([params[row].xtc_threshold for row in left_out]),
        words=torch.from_numpy(masks.words if masks.places else NO_MASKS.words),
        drawn=torch.tensor(drawn, dtype=torch.int64),
    )
    most = max(alternatives)
    plain = most < 0 and not masks.places and not len(columns.edit_ids) and all(p.temperature == 0 for p in params)
    return _packed(columns, plain, None if most < 0 else most)


def _packed(columns: Columns, plain: bool, alternatives: int | None) -> SamplingRows:
    buffer = torch.zeros(extent(columns), dtype=torch.uint8)
    rows = SamplingRows(buffer, Columns._make(views(buffer, columns)), plain, alternatives)
    for place, column in zip(rows.columns, columns, strict=True):
        place.copy_(column)
    return rows


def told(sampled: Sampled, picks: Sequence[Pick], masks: Masks = NO_MASKS) -> list[SampledToken]:
    """What came back to the host, for the picks and masks that `rows_of` was given: a token, or what the problem is."""
    ids = sampled.columns.token_ids.tolist()
    reports = _reports(sampled.columns, ids, picks)
    return [_told_one(*found, masks) for found in zip(picks, ids, reports, strict=True)]


def _told_one(pick: Pick, token_id: int, report: TokenLogprobs | None, masks: Masks) -> SampledToken:
    if (failed := masks.failure(pick.request.id)) is not None:
        return failed
    if token_id == NOT_A_NUMBER:
        return SampledToken(pick.request.id, None, problem=NOT_NUMBERS)
    return SampledToken(pick.request.id, token_id, report)


def _reports(columns: SampledColumns, ids: Sequence[int], picks: Sequence[Pick]) -> list[TokenLogprobs | None]:
    wanted = [pick.request.params.logprobs for pick in picks]
    if all(count is None for count in wanted):
        return [None] * len(picks)
    picked, top_ids, top = columns.picked.tolist(), columns.top_ids.tolist(), columns.top.tolist()
    return [
        None if count is None else TokenLogprobs(ids[row], picked[row], _top(top_ids[row][:count], top[row][:count]))
        for row, count in enumerate(wanted)
    ]


def _top(ids: Sequence[int], logprobs: Sequence[float]) -> tuple[tuple[int, float], ...]:
    return tuple((token_id, logprob) for token_id, logprob in zip(ids, logprobs, strict=True) if token_id != NO_TOKEN)


def _uniforms(pick: Pick) -> list[float]:
    params = pick.request.params
    if params.temperature == 0:
        return [0.0] * TRIES
    return [uniform(params.seed, pick.index, attempt) for attempt in range(TRIES)]


class _Edits(NamedTuple):
    """Of one row, as in `Columns`."""

    rows: Tensor
    ids: Tensor
    bias: Tensor
    told: Tensor


_NO_IDS, _NO_BIAS = torch.empty(0, dtype=torch.int32), torch.empty(0)
_NONE = _Edits(_NO_IDS, _NO_IDS, _NO_BIAS, _NO_IDS)


def _edits(row: int, pick: Pick, vocabulary: int) -> _Edits:
    """Biases of one token, and what a repetition costs it, are added up first."""
    request, params = pick.request, pick.request.params
    if params.needs_reply and len(request.output_ids) != pick.index:
        raise ValueError(f"penalties of token {pick.index} of a reply need all tokens before it")
    biases: dict[int, float] = {}
    for token_id, value in (*params.logit_bias, *((i, -cost) for i, cost in dry_penalties(request).items())):
        biases[token_id] = biases.get(token_id, 0.0) + value
    if pick.index < params.min_tokens:
        biases |= dict.fromkeys((*request.end_ids, *params.stop_token_ids), -np.inf)
    if not biases and not params.penalizes:
        return _NONE
    if biases and not 0 <= min(biases) <= max(biases) < vocabulary:
        raise IndexError(f"a token id is not in the vocabulary of {vocabulary}")
    bias = np.zeros(vocabulary, np.float32)
    bias[list(biases)] = list(biases.values())
    told = _counts(pick, vocabulary)
    ids = np.flatnonzero((bias != 0) | (told != UNSEEN))
    return _Edits(
        torch.full((len(ids),), row, dtype=torch.int32),
        torch.from_numpy(ids.astype(np.int32)),
        torch.from_numpy(bias[ids]),
        torch.from_numpy(told[ids]),
    )


def _counts(pick: Pick, vocabulary: int) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    """How often the reply has each token of the vocabulary."""
    told = np.full(vocabulary, UNSEEN, np.int32)
    if pick.request.params.penalizes:
        known = np.frombuffer(known_ids(pick.request), np.int64)
        told[known] = 0
        reply = known[len(pick.request.prompt_ids) :]
        told[reply] = np.bincount(reply, minlength=vocabulary)[reply]
    return told
