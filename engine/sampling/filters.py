"""DRY repetition penalties, and the XTC filter."""

import hashlib
from array import array
from collections.abc import Collection
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.request import Request
from engine.sampling.drawing import Filters, kept_weights
from engine.sampling_params import DryParams, SamplingParams

# Longest repetition that DRY counts, in tokens, as in the original implementation. Its penalty exceeds every logit.
MAX_MATCH = 50


# Arrays are kept between steps, so that each step converts only the new tokens.
_token_arrays: "WeakKeyDictionary[Request, array[int]]" = WeakKeyDictionary()


def token_array(request: Request) -> "array[int]":
    """Return all known tokens of a request, prompt and reply, as int64.

    Drop all views of the result before the next call, which may resize it.
    """
    ids = _token_arrays.setdefault(request, array("q"))
    ids.extend(request.token_ids(len(ids), request.num_tokens))
    return ids


def dry_penalties(request: Request) -> dict[int, float]:
    """Return the DRY penalty by token id, for tokens that would continue a repetition in the prompt or the reply."""
    dry = request.params.dry
    if dry is None:
        return {}
    known = np.frombuffer(token_array(request), np.int64)
    return _penalties(known if dry.last_n is None else known[max(0, len(known) - dry.last_n) :], dry)


def _penalties(ids: NDArray[np.int64], dry: DryParams) -> dict[int, float]:
    counted = _unbroken(ids, dry.breakers)
    if not counted:
        return {}
    positions = np.flatnonzero(ids[:-1] == ids[-1])
    lengths = np.ones(len(positions), np.int64)
    for length in range(1, counted):  # invariant: positions[lengths >= length] end a match of at least `length` tokens
        going = np.flatnonzero((lengths == length) & (positions >= length))
        going = going[ids[positions[going] - length] == ids[-1 - length]]
        if not len(going):
            break
        lengths[going] += 1
    longest: dict[int, int] = {}
    for token, length in zip(ids[positions + 1].tolist(), lengths.tolist(), strict=True):
        if length >= dry.allowed_length and token not in dry.breakers:
            longest[token] = max(length, longest.get(token, 0))
    return {token: dry.multiplier * dry.base ** (n - dry.allowed_length) for token, n in longest.items()}


def _unbroken(ids: NDArray[np.int64], breakers: Collection[int]) -> int:
    """Return the number of tokens after the last breaker, at most MAX_MATCH: a repetition cannot be longer."""
    last = ids[-MAX_MATCH:].tolist()
    return next((n for n, token in enumerate(reversed(last)) if token in breakers), len(last))


MAX_THRESHOLD = 0.5  # at most one token has a higher probability than this, so XTC would remove none


def xtc_applies(params: SamplingParams, index: int) -> bool:
    """Whether XTC removes top choices for token `index` of a reply. It never does at temperature 0."""
    if params.temperature == 0 or params.xtc_probability == 0 or params.xtc_threshold > MAX_THRESHOLD:
        return False
    digest = hashlib.sha256(b"xtc" + params.seed.to_bytes(8, "little") + index.to_bytes(8, "little")).digest()
    return (int.from_bytes(digest[:8], "little") >> 11) / (1 << 53) < params.xtc_probability


def xtc_logits(logits: Tensor, filters: Filters, thresholds: Tensor) -> Tensor:
    """Apply filters and XTC: set the logits of all dropped tokens to -inf, so that no filter remains to be applied.

    `logits` is float32 [rows, vocabulary], `thresholds` float32 [rows, 1]. Returns float32 [rows, vocabulary] on the
    device of the logits.
    """
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    weights, positions = kept_weights(values, filters), torch.arange(logits.shape[1], device=logits.device)
    likely = (weights >= thresholds * weights.sum(-1, keepdim=True)) & (weights > 0)
    left = (weights > 0) & (positions >= likely.sum(-1, keepdim=True) - 1)
    return torch.full_like(logits, -torch.inf).scatter(-1, ids, torch.where(left, values, -torch.inf))
