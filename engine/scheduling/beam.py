"""Beam search: decides which beams survive a round, which sequences have ended, and when the search stops.

In each round every live beam delivers its most likely next tokens. The best `width` continuations of all beams survive.
Continuations that end the reply and rank among the best `width` become hypotheses. Scores, hypotheses, and the stopping
rule equal those of transformers' `generate(num_beams=...)`: a score is the sum of log-probabilities, divided by the
length of the reply to the power of `length_penalty`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.request import FinishReason, Request, TokenLogprobs
from engine.sampling_params import BeamParams, SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """A sequence: its last token and a link to the preceding beam, so that beams share common prefixes."""

    before: "Beam | None" = None  # the preceding beam; None: this beam is the empty reply
    token_id: int = -1
    logprobs: TokenLogprobs | None = None  # log-probabilities of the token, if they were requested
    score: float = 0.0  # sum of the log-probabilities of the sequence
    length: int = 0

    def token_ids(self, start: int = 0) -> list[int]:
        """Return the token ids of the sequence from index `start` on."""
        return [beam.token_id for beam in self.path(start)]

    def path(self, start: int = 0) -> "list[Beam]":
        """Return the beams on the path to this one with start + 1, start + 2, ... tokens. The last is this beam."""
        path: list[Beam] = []
        beam: Beam | None = self
        while beam is not None and beam.length > start:
            path.append(beam)
            beam = beam.before
        return path[::-1]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A sequence that has ended."""

    beam: Beam
    score: float  # total log-probability, normalized by length
    finish: FinishReason


class BeamSearch:
    """The state of one beam search. `max_tokens` limits the length of a reply."""

    def __init__(self, beams: BeamParams, params: SamplingParams, end_ids: frozenset[int], max_tokens: int) -> None:
        self.live: list[Beam] = [Beam()]
        self.hypotheses: list[Hypothesis] = []  # the best hypotheses, at most `width`, best first
        self._beams = beams
        self._params = params
        self._ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else end_ids)
        self._max_tokens = max_tokens
        self._delivered: dict[Beam, Sequence[tuple[int, float]]] = {}

    @property
    def alternatives(self) -> int:
        """Number of most likely tokens to request from each beam.

        It is large enough that `width` continuations survive, even if all others end the reply.
        """
        return max(self._beams.width + len(self._ends), self._params.logprobs or 0)

    @property
    def has_ended(self) -> bool:
        return not self.live

    def collect(self, beam: Beam, most_likely: Sequence[tuple[int, float]]) -> bool:
        """Add the most likely next tokens of a live beam, with their log-probabilities, most likely first.

        Returns whether all beams have delivered.
        """
        self._delivered[beam] = most_likely
        return len(self._delivered) == len(self.live)

    def discard_round(self) -> None:
        """Drop the tokens delivered in this round. The live beams will deliver them again."""
        self._delivered.clear()

    def advance(self) -> None:
        """End the round once all beams have delivered. `live` becomes the survivors; empty if the search has ended."""
        width, length = self._beams.width, self.live[0].length + 1
        live: list[Beam] = []
        for rank, beam in enumerate(self._candidates(length)):
            if beam.token_id not in self._ends and length < self._max_tokens:
                live.append(beam)
            elif rank < width:
                self._add_hypothesis(beam)
            if len(live) == width:
                break
        self._delivered.clear()
        self.live = live if live and self._may_improve(live[0]) else []

    def common(self) -> Beam:
        """Return the longest common prefix of all live beams."""
        beams = set(self.live)
        while len(beams) > 1:
            # all beams in the set have the same length
            beams = {beam.before for beam in beams if beam.before is not None}
        (beam,) = beams
        return beam

    def _candidates(self, length: int) -> list[Beam]:
        """Return every allowed continuation of the live beams, best first."""
        too_early = self._ends if length <= self._params.min_tokens else frozenset()
        found = [
            Beam(beam, token_id, self._token_logprobs(beam, token_id, logprob), beam.score + logprob, length)
            for beam in self.live
            for token_id, logprob in self._delivered[beam]
            if token_id not in too_early
        ]
        return sorted(found, key=lambda beam: -beam.score)

    def _token_logprobs(self, beam: Beam, token_id: int, logprob: float) -> TokenLogprobs | None:
        if self._params.logprobs is None:
            return None
        return TokenLogprobs(token_id, logprob, tuple(self._delivered[beam][: self._params.logprobs]))

    def _add_hypothesis(self, beam: Beam) -> None:
        finish = FinishReason.STOP if beam.token_id in self._ends else FinishReason.LENGTH
        self.hypotheses.append(Hypothesis(beam, self._normalized(beam.score, beam.length), finish))
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
        del self.hypotheses[self._beams.width :]

    def _normalized(self, score: float, length: int) -> float:
        penalty: float = length**self._beams.length_penalty
        return score / penalty

    def _may_improve(self, best: Beam) -> bool:
        """Whether a live beam can still produce a hypothesis that ranks among the best `width`. `best` is the best live
        beam.
        """
        if len(self.hypotheses) < self._beams.width:
            return True
        if self._beams.early_stopping is True:
            return False
        hopeful = self._beams.early_stopping == "never" and self._beams.length_penalty > 0
        length = self._max_tokens if hopeful else best.length
        return self._normalized(best.score, length) > self.hypotheses[-1].score


@dataclass(slots=True, eq=False)
class BeamGroup:
    """The requests of one beam search. `results` never run: each gets one of the best sequences at the end."""

    results: tuple[Request, ...]
    beams: BeamParams
    policy: BeamSearch
    max_tokens: int  # maximum number of tokens in a reply
    # the requests and the beam that each computes; or a single request for the common prefix of all beams
    live: dict[Request, Beam] = field(default_factory=dict)

    @property
    def requests(self) -> list[Request]:
        return list(self.live)
