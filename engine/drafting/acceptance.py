"""Acceptance: how often drafted tokens turn out right, by source and match length.

Drafts are compared with the tokens that were sampled, whether a step verified them or not. So the estimates are known
before a step is spent on a draft, and bad drafts are never tried to find out that they are bad.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.draft import Draft, Source

# match length -> assumed acceptance before anything was observed
PRIORS = {3: 0.4, 4: 0.5, 6: 0.6, 8: 0.7, 12: 0.8, 16: 0.85, 24: 0.9}
WEIGHT = 0.05  # weight of the latest observation in an average
MAX_DRAFT = 15  # tokens


def _bucket(match_length: int) -> int:
    return max((length for length in PRIORS if length <= match_length), default=min(PRIORS))


@dataclass(slots=True)
class Acceptance:
    """Estimates of the chance that a drafted token is right, given that all before it were."""

    _averages: dict[tuple[Source, int], float] = field(default_factory=dict)

    def chance(self, source: Source, match_length: int) -> float:
        """Return the estimated chance of a token that follows a match of this length."""
        bucket = _bucket(match_length)
        return self._averages.get((source, bucket), PRIORS[bucket])

    def reach(self, draft: Draft) -> Iterator[float]:
        """Yield for each token of a draft the chance that it and all before it are right."""
        reached = 1.0
        for offset in range(len(draft.token_ids)):
            reached *= self.chance(draft.source, draft.match_length + offset)
            yield reached

    def observe(self, draft: Draft, sampled: list[int]) -> None:
        """Compare a draft with the sampled tokens at its positions, up to the first difference."""
        for offset, (drafted, token_id) in enumerate(zip(draft.token_ids, sampled, strict=False)):
            key = draft.source, _bucket(draft.match_length + offset)
            average = self._averages.get(key, PRIORS[key[1]])
            self._averages[key] = average + WEIGHT * ((drafted == token_id) - average)
            if drafted != token_id:
                return
