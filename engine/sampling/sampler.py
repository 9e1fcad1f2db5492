"""The sampler: pure functions that turn the logits of a step into tokens.

Order: logit bias and DRY, forbidden end tokens, penalties, grammar, temperature, then the filters min-p, top-k, top-p,
and XTC, then the draw. Every function works row by row, so the token of a row does not depend on other rows. A draw
needs uniform numbers, which depend only on the seed of the request and the index of the token. The token is therefore
the same after preemption, after a restart, and in any batch.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.request import Request, TokenLogprobs
from engine.sampling.drawing import ATTEMPTS, Draw, Filters, Logits, draw, sampled_logprobs
from engine.sampling.filters import dry_penalties, token_array, xtc_applies, xtc_logits
from engine.sampling.masks import NO_MASKS, Masks, next_position
from engine.step import SampledToken

SMALL_MASK = 512  # rows with at most this many allowed tokens are sampled without reading the rest of the vocabulary
NOT_NUMBERS = (
    "The model computed NaN or infinite values: its weights may be damaged. "
    "Pull the model again; if that does not help, try another file of the model."
)


def next_tokens(
    logits: Logits, rows: Sequence[int], requests: Sequence[Request], masks: Masks = NO_MASKS
) -> list[SampledToken]:
    """Return the next token of each request: requests[i] samples from row rows[i] of the logits, under `masks`.

    If the device has already found the most likely tokens and all requests need only those, no logits are read.
    """
    greedy = logits.greedy
    if greedy is not None and not masks.problems and all(map(_is_plain, requests)):
        found = list(zip(requests, (greedy[row] for row in rows), strict=True))
        if all(masks.allows(next_position(request), token_id) for request, token_id in found):
            return [_sampled(request, token_id) for request, token_id in found]
    together = list(rows) == list(range(len(rows)))  # true in most steps, and then no rows are copied
    values = logits.values[: len(rows)] if together else logits.values[list(rows)]
    return sample(values, requests, masks, logits.draw)


def _is_plain(request: Request) -> bool:
    """Whether the next token is simply the most likely one under the model's own distribution."""
    params = request.params
    early = len(request.output_ids) < params.min_tokens
    shaped = early or params.logit_bias or params.logprobs is not None or params.needs_reply
    return params.temperature == 0 and not shaped


def _sampled(request: Request, token_id: int, report: TokenLogprobs | None = None) -> SampledToken:
    """Return a sampled token, or a problem for a negative `token_id`, which marks a row of NaN."""
    if token_id < 0:
        return SampledToken(request.id, None, problem=NOT_NUMBERS)
    return SampledToken(request.id, token_id, report)


@torch.inference_mode()
def sample(
    logits: Tensor, requests: Sequence[Request], masks: Masks = NO_MASKS, draw_unfiltered: Draw | None = None
) -> list[SampledToken]:
    """Sample the next token of each request. `logits` is float32 [rows, vocabulary], row r for requests[r].

    A request gets a problem instead if its row contains NaN or infinity, or if its grammar cannot continue. The other
    requests get their tokens.
    """
    # NaN makes the maximum NaN; computing it takes a tenth of the time of a full check
    numbers = logits.amax(-1) < torch.inf
    if masks.problems or not numbers.all():
        return _sample_around(numbers.tolist(), logits, requests, masks, draw_unfiltered)
    shaped = logits
    for step in (apply_bias, forbid_early_end, apply_penalties):
        shaped = step(shaped, requests)
    sampled = _sample_unfiltered(draw_unfiltered, shaped, requests, masks) if draw_unfiltered is not None else {}
    left = [row for row in range(len(requests)) if row not in sampled]
    if left:
        rows = left if sampled else slice(None)  # a slice copies nothing
        others = sample_allowed(shaped[rows], logits[rows], [requests[row] for row in left], masks)
        sampled |= zip(left, others, strict=True)
    token_ids = [sampled[row] for row in range(len(requests))]
    reports = report_logprobs(logits, shaped, token_ids, requests, masks)
    return [_sampled(*found) for found in zip(requests, token_ids, reports, strict=True)]


def _sample_around(
    numbers: Sequence[bool], logits: Tensor, requests: Sequence[Request], masks: Masks, draw_unfiltered: Draw | None
) -> list[SampledToken]:
    """Sample the valid rows, and return problems for the others: rows with NaN or infinity, and failed grammars."""
    fine = [row for row, it in enumerate(requests) if numbers[row] and it.id not in masks.problems]
    results = [masks.failure(it.id) or SampledToken(it.id, None, problem=NOT_NUMBERS) for it in requests]
    rest = sample(logits[fine], [requests[row] for row in fine], replace(masks, problems={}), draw_unfiltered)
    for row, token in zip(fine, rest, strict=True):
        results[row] = token
    return results


# -- shaping logits: each function returns new logits, or the same object if no request needs a change


def apply_bias(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """Add each request's `logit_bias`, and subtract its DRY penalties."""
    entries = [(row, i, bias) for row, request in enumerate(requests) for i, bias in request.params.logit_bias]
    entries += [(row, i, -cost) for row, request in enumerate(requests) for i, cost in dry_penalties(request).items()]
    if not entries:
        return logits
    rows, ids, biases = zip(*entries, strict=True)
    return logits.index_put((torch.tensor(rows), torch.tensor(ids)), torch.tensor(biases), accumulate=True)


def forbid_early_end(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """Set end and stop tokens to -inf for requests that have not reached `min_tokens`."""
    entries = [
        (row, token_id)
        for row, request in enumerate(requests)
        if len(request.output_ids) < request.params.min_tokens
        for token_id in {*request.end_ids, *request.params.stop_token_ids}
    ]
    if not entries:
        return logits
    rows, ids = zip(*entries, strict=True)
    return logits.index_put((torch.tensor(rows), torch.tensor(ids)), torch.tensor(-torch.inf))


def apply_penalties(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """Apply repetition penalties over prompt and reply (arXiv:1909.05858), and presence and frequency penalties over
    the reply.
    """
    penalized = [row for row, request in enumerate(requests) if request.params.penalizes]
    if not penalized:
        return logits
    logits = logits.clone()
    for row in penalized:
        request, params = requests[row], requests[row].params
        if params.repetition_penalty != 1.0:
            seen = torch.frombuffer(token_array(request), dtype=torch.int64)
            values, factor = logits[row, seen], params.repetition_penalty
            logits[row, seen] = torch.where(values > 0, values / factor, values * factor)
        if request.output_ids and (params.presence_penalty or params.frequency_penalty):
            reply = torch.frombuffer(token_array(request), dtype=torch.int64, offset=8 * len(request.prompt_ids))
            ids, counts = torch.unique(reply, return_counts=True)
            logits[row, ids] -= params.frequency_penalty * counts + params.presence_penalty
    return logits


# -- sampling token ids


def _sample_unfiltered(
    draw_unfiltered: Draw, shaped: Tensor, requests: Sequence[Request], masks: Masks
) -> dict[int, int]:
    """Sample the rows without filters. Returns token ids by row, leaving out rows whose allowed tokens have no
    probability.
    """
    rows = [row for row, request in enumerate(requests) if _is_unfiltered(request)]
    if not rows:
        return {}
    free = [requests[row] for row in rows]
    drawn = draw_unfiltered(
        shaped,
        rows,
        masks.words,
        [masks.mask_rows.get(next_position(request), -1) for request in free],
        [request.params.temperature for request in free],
        [uniform(request.params.seed, len(request.output_ids)) for request in free],
    )
    return {row: token_id for row, token_id in zip(rows, drawn, strict=True) if token_id >= 0}


def _is_unfiltered(request: Request) -> bool:
    """Whether the request samples by temperature only, without filters."""
    params = request.params
    filtered = params.top_k or params.top_p < 1 or params.min_p or xtc_applies(params, len(request.output_ids))
    return params.temperature > 0 and not filtered


def sample_allowed(shaped: Tensor, logits: Tensor, requests: Sequence[Request], masks: Masks) -> list[int]:
    """Sample from the tokens that each grammar allows, by their `shaped` logits.

    If `shaped` excludes all allowed tokens of a row, its `logits` are used instead.
    """
    if not masks.mask_rows:
        return sample_ids(shaped, requests)
    vocabulary = logits.shape[1]
    positions = [next_position(it) for it in requests]
    held = {row: position for row, position in enumerate(positions) if position in masks.mask_rows}
    counted = {row: masks.allowed_ids(position, vocabulary, SMALL_MASK) for row, position in held.items()}
    few = {row: ids for row, ids in counted.items() if ids is not None}
    sampled = dict(zip(few, _sample_small_masks(shaped, logits, requests, few), strict=True))
    rest = [row for row in range(len(requests)) if row not in few]
    if rest:
        others = [requests[row] for row in rest]
        possible = torch.from_numpy(masks.allowed_rows([positions[row] for row in rest], vocabulary))
        sampled |= zip(rest, sample_ids(masked(shaped[rest], logits[rest], possible), others), strict=True)
    return [sampled[row] for row in range(len(requests))]


def _sample_small_masks(
    shaped: Tensor, logits: Tensor, requests: Sequence[Request], few: Mapping[int, NDArray[np.int64]]
) -> list[int]:
    """Sample rows with few allowed tokens, treating these tokens as a small vocabulary.

    All small vocabularies have the same size, so that the result of a row does not depend on other rows.
    """
    if not few:
        return []
    values = np.full((len(few), SMALL_MASK), -np.inf, np.float32)
    first, second = shaped.numpy(), logits.numpy()  # numpy views, which gather a few numbers faster than tensors
    for index, (row, ids) in enumerate(few.items()):
        possible = first[row, ids]
        values[index, : len(ids)] = possible if possible.max() > -np.inf else second[row, ids]
    positions = sample_ids(torch.from_numpy(values), [requests[row] for row in few])
    return [int(ids[position]) for ids, position in zip(few.values(), positions, strict=True)]


def masked(shaped: Tensor, logits: Tensor, possible: Tensor) -> Tensor:
    """Return `shaped` with the logits of all tokens that are not `possible` (bool, same shape) set to -inf.

    If that leaves no token in a row, the row of `logits` is used instead. All are float32 [rows, vocabulary].
    """
    held = torch.where(possible, shaped, -torch.inf)
    nothing = held.amax(-1) == -torch.inf
    if nothing.any():
        held[nothing] = torch.where(possible[nothing], logits[nothing], -torch.inf)
    return held


def sample_ids(logits: Tensor, requests: Sequence[Request]) -> list[int]:
    """Return one token id per row: the most likely at temperature 0, else a draw from the filtered distribution."""
    drawing = [row for row, request in enumerate(requests) if request.params.temperature > 0]
    if not drawing:
        return logits.argmax(-1).tolist()
    drawers = [requests[row] for row in drawing]
    filters = Filters.of([request.params for request in drawers], logits.shape[1])
    drawn_from = logits if len(drawing) == len(requests) else logits[drawing]
    drawn_from, filters = _apply_xtc(drawn_from, filters, drawers)
    numbers = [[uniform(r.params.seed, len(r.output_ids), attempt) for attempt in range(ATTEMPTS)] for r in drawers]
    uniforms = torch.tensor(numbers, dtype=torch.float64)
    if len(drawing) == len(requests):
        return draw(drawn_from, filters, uniforms).tolist()
    sampled = logits.argmax(-1)
    sampled[drawing] = draw(drawn_from, filters, uniforms)
    return sampled.tolist()


def _apply_xtc(logits: Tensor, filters: Filters, requests: Sequence[Request]) -> tuple[Tensor, Filters]:
    """Return the logits after XTC, and the filters to apply, which are disabled for the rows that XTC changed."""
    hit = [row for row, request in enumerate(requests) if xtc_applies(request.params, len(request.output_ids))]
    if not hit:
        return logits, filters
    thresholds = torch.tensor([[requests[row].params.xtc_threshold] for row in hit])
    logits = logits.clone()
    logits[hit] = xtc_logits(logits[hit], filters.rows(torch.tensor(hit)), thresholds)
    return logits, filters.without_filters(torch.tensor(hit), logits.shape[1])


def uniform(seed: int, index: int, attempt: int = 0) -> float:
    """Return a number in [0, 1) with 53 random bits, which depends only on seed, index, and attempt."""
    digest = hashlib.sha256(seed.to_bytes(8, "little") + index.to_bytes(8, "little")).digest()
    return (int.from_bytes(digest[8 * attempt : 8 * attempt + 8], "little") >> 11) / (1 << 53)


# -- log-probabilities


def report_logprobs(
    logits: Tensor, shaped: Tensor, token_ids: Sequence[int], requests: Sequence[Request], masks: Masks = NO_MASKS
) -> list[TokenLogprobs | None]:
    """Return the log-probabilities that each request has requested.

    They refer to the model's own distribution, `logits`. With `drawn_logprobs`, they refer to the distribution that the
    token was sampled from, which `shaped` and `masks` define.
    """
    reports: list[TokenLogprobs | None] = []
    for row, (token_id, request) in enumerate(zip(token_ids, requests, strict=True)):
        alternatives, one = request.params.logprobs, slice(row, row + 1)
        if alternatives is None:
            reports.append(None)
        elif request.params.drawn_logprobs:
            reports.append(_drawn_logprobs(shaped[one], logits[one], token_id, request, masks))
        else:
            reports.append(_logprobs(logits[row], token_id, alternatives))
    return reports


def _drawn_logprobs(shaped: Tensor, logits: Tensor, token_id: int, request: Request, masks: Masks) -> TokenLogprobs:
    """Return the log-probabilities of one row, float32 [1, vocabulary], under the distribution of `sample_allowed`."""
    params, vocabulary = request.params, logits.shape[1]
    if (position := next_position(request)) in masks.mask_rows:
        shaped = masked(shaped, logits, torch.from_numpy(masks.allowed_rows([position], vocabulary)))
    drawn_from, filters = _apply_xtc(shaped, Filters.of([params], vocabulary), [request])
    found = sampled_logprobs(drawn_from, filters, torch.tensor([token_id]), params.logprobs or 0)
    logprob, ids, top = (one.tolist()[0] for one in found)
    return TokenLogprobs(token_id, logprob, tuple(zip(ids, top, strict=True)))


@torch.inference_mode()
def report_prompt(logits: Tensor, request: Request, positions: range) -> tuple[TokenLogprobs, ...]:
    """Return the log-probabilities of prompt tokens. Row r of `logits` predicts the token after positions[r]."""
    alternatives = request.params.prompt_logprobs or 0
    return tuple(
        _logprobs(row, request.prompt_ids[position + 1], alternatives)
        for row, position in zip(logits, positions, strict=False)
    )


def _logprobs(logits: Tensor, token_id: int, alternatives: int) -> TokenLogprobs:
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    values, ids = logprobs.topk(alternatives)
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(token_id, float(logprobs[token_id]), top)
