"""Draft: tokens that may come next, taken from earlier text."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Self


class Source(enum.Enum):
    """The origin of a draft."""

    PREDICTION = "prediction"  # the reply that the client predicts
    HISTORY = "history"  # the request's own prompt and reply
    CORPUS = "corpus"  # earlier replies with the same cache salt
    MODEL = "model"  # a smaller model with the same vocabulary


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may come next."""

    source: Source
    match_length: int  # number of tokens before the draft that occurred before it earlier; 0 for a model's draft
    token_ids: tuple[int, ...]
    percentages: tuple[int, ...] = ()  # probability of each token by the draft model; empty for other sources
    # Number of tokens in each run: a token that a step verifies, and those that a grammar forces after it. Empty if
    # each token is a run.
    runs: tuple[int, ...] = ()

    def evidence(self, offset: int) -> int:
        """Return what supports the token at an offset: its percentage, or the number of matching tokens before it."""
        return self.percentages[offset] if self.percentages else self.match_length + offset

    @property
    def samples(self) -> Sequence[int]:
        """The numbers of drafted tokens after which a step samples a token, 0 included."""
        return tuple(accumulate(self.runs, initial=0)) if self.runs else range(len(self.token_ids) + 1)

    def num_right(self, token_ids: Sequence[int]) -> int:
        """Return how many drafted tokens, counted from the first, equal those of `token_ids` at the same offsets."""
        pairs = enumerate(zip(self.token_ids, token_ids, strict=False))
        shorter = min(len(self.token_ids), len(token_ids))
        return next((number for number, (drafted, token_id) in pairs if drafted != token_id), shorter)

    def first(self, count: int) -> Self:
        """Return the runs within the draft's first `count` tokens."""
        kept = [number for number in self.samples if number <= count]
        return self._cut(kept[-1], self.runs[: len(kept) - 1])

    def in_runs(self, runs: Sequence[int]) -> Self:
        """Return the draft's first tokens, divided into runs of these lengths."""
        return self._cut(sum(runs), tuple(runs))

    def _cut(self, count: int, runs: tuple[int, ...]) -> Self:
        return replace(self, token_ids=self.token_ids[:count], percentages=self.percentages[:count], runs=runs)


NO_DRAFT = Draft(Source.HISTORY, 0, ())


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Numbers of tokens that were drafted and verified, and of those that turned out right."""

    drafted: int = 0
    accepted: int = 0

    def __add__(self, other: "DraftCounts") -> "DraftCounts":
        return DraftCounts(self.drafted + other.drafted, self.accepted + other.accepted)


NO_DRAFTS = DraftCounts()
