"""Acceptance: how often drafted tokens turn out right, by source and by evidence (see `Draft.evidence`).

Drafts are compared with the tokens that were sampled, whether a step verified them or not. So the estimates are known
before a step is spent on a draft, and bad drafts are never tried to find out that they are bad.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.draft import Draft, Source

# evidence -> assumed acceptance before anything was observed
BY_MATCH_LENGTH = {3: 0.4, 4: 0.5, 6: 0.6, 8: 0.7, 12: 0.8, 16: 0.85, 24: 0.9}
BY_PERCENTAGE = {0: 0.2, 20: 0.35, 40: 0.5, 60: 0.65, 80: 0.8, 95: 0.9, 99: 0.95}
PRIORS = {source: BY_PERCENTAGE if source is Source.MODEL else BY_MATCH_LENGTH for source in Source}
WEIGHT = 0.05  # weight of the latest observation in an average of many
ASSUMED = 4  # number of observations for which an assumed acceptance counts
MAX_DRAFT = 15  # tokens


def _bucket(source: Source, evidence: int) -> int:
    return max((lowest for lowest in PRIORS[source] if lowest <= evidence), default=min(PRIORS[source]))


@dataclass(slots=True)
class Acceptance:
    """Estimates of the chance that a drafted token is right, given that all before it were."""

    # (source, bucket of evidence) -> (average, number of observations)
    _averages: dict[tuple[Source, int], tuple[float, int]] = field(default_factory=dict)

    def chance(self, source: Source, evidence: int) -> float:
        """Return the estimated chance of a token with this evidence."""
        return self._average(source, _bucket(source, evidence))[0]

    def _average(self, source: Source, bucket: int) -> tuple[float, int]:
        return self._averages.get((source, bucket)) or (PRIORS[source][bucket], 0)

    def reach(self, draft: Draft) -> Iterator[float]:
        """Yield for each token of a draft the chance that it and all before it are right."""
        reached = 1.0
        for offset in range(len(draft.token_ids)):
            reached *= self.chance(draft.source, draft.evidence(offset))
            yield reached

    def observe(self, draft: Draft, sampled: list[int]) -> None:
        """Compare a draft with the sampled tokens at its positions, up to the first difference."""
        for offset, (drafted, token_id) in enumerate(zip(draft.token_ids, sampled, strict=False)):
            key = draft.source, _bucket(draft.source, draft.evidence(offset))
            average, count = self._average(*key)
            weight = max(WEIGHT, 1 / (ASSUMED + count + 1))
            self._averages[key] = average + weight * ((drafted == token_id) - average), count + 1
            if drafted != token_id:
                return
