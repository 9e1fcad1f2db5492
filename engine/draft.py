"""Draft: tokens that may come next, taken from earlier text."""

import enum
from dataclasses import dataclass, replace
from typing import Self


class Source(enum.Enum):
    """The origin of a draft."""

    PREDICTION = "prediction"  # the reply that the client predicts
    HISTORY = "history"  # the request's own prompt and reply
    CORPUS = "corpus"  # earlier replies with the same cache salt


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may come next. They follow an earlier occurrence of the last `match_length` tokens."""

    source: Source
    match_length: int
    token_ids: tuple[int, ...]

    def first(self, count: int) -> Self:
        """Return the draft's first `count` tokens."""
        return replace(self, token_ids=self.token_ids[:count])


NO_DRAFT = Draft(Source.HISTORY, 0, ())


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Numbers of tokens that were drafted and verified, and of those that turned out right."""

    drafted: int = 0
    accepted: int = 0

    def __add__(self, other: "DraftCounts") -> "DraftCounts":
        return DraftCounts(self.drafted + other.drafted, self.accepted + other.accepted)


NO_DRAFTS = DraftCounts()
