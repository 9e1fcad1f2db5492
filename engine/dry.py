"""DRY ("don't repeat yourself"): tokens that would go on with a repetition become less likely, most behind long ones.

The rule is that of its author (oobabooga/text-generation-webui, pull request 5677), with the names and defaults that
llama.cpp gives its parameters: where the last n tokens stand somewhere before, the token behind them there loses
multiplier * base ** (n - allowed_length), if n is at least allowed_length. A breaker is part of no repetition, so that
what every line or turn begins with costs nothing. Works on ids of one request, on the host; refuses to know logits.
"""

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from engine.request import DryParams, Request

MAX_MATCH = 50  # tokens of a repetition that count, as its author has it: the penalty is beyond all logits long before


def dry_penalties(request: Request) -> dict[int, float]:
    """What each token that may not come next loses, by id; of the tokens that are known, prompt and reply alike."""
    dry = request.params.dry
    if dry is None:
        return {}
    known = np.frombuffer(request.known_ids(), np.int64)
    return _penalties(known if dry.last_n is None else known[max(0, len(known) - dry.last_n) :], dry)


def _penalties(ids: NDArray[np.int64], dry: DryParams) -> dict[int, float]:
    counted = _unbroken(ids, dry.breakers)
    if not counted:
        return {}
    places = np.flatnonzero(ids[:-1] == ids[-1])
    lengths = np.ones(len(places), np.int64)
    for length in range(1, counted):  # places[lengths >= length] end a match of that many tokens
        going = np.flatnonzero((lengths == length) & (places >= length))
        going = going[ids[places[going] - length] == ids[-1 - length]]
        if not len(going):
            break
        lengths[going] += 1
    longest: dict[int, int] = {}
    for token, length in zip(ids[places + 1].tolist(), lengths.tolist(), strict=True):
        if length >= dry.allowed_length and token not in dry.breakers:
            longest[token] = max(length, longest.get(token, 0))
    return {token: dry.multiplier * dry.base ** (n - dry.allowed_length) for token, n in longest.items()}


def _unbroken(ids: NDArray[np.int64], breakers: Collection[int]) -> int:
    """How many of the last tokens a repetition can be made of."""
    last = ids[-MAX_MATCH:].tolist()
    return next((n for n, token in enumerate(reversed(last)) if token in breakers), len(last))
