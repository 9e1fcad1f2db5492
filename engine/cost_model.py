"""What steps and copies cost on this machine, learnt from those there were, and the two decisions that follow from it.

The time of a step is a fixed part and a part for each token; both follow the machine as it is now, since older steps
count less. Knows sizes and seconds. Refuses to know requests.
"""

from dataclasses import dataclass, field

from engine.config import BLOCK_SIZE, EngineConfig, Preemption

MEMORY = 0.97  # what an observation is worth after each later one
COPY_RATE = 4e9  # bytes a second, until a copy was measured
RECENT = 8  # copies that the rate is the mean of, about
OUTLIER = 4.0  # times the expected time: somebody else had the machine
AIM = 0.8  # of the target: steps differ, and hardly any should take longer
SPARED = 4.0  # a chunk takes at least this many times the fixed part of a step: a fifth of a prompt's time at most


@dataclass(slots=True)
class StepTimes:
    """seconds = fixed + per_token * tokens, fitted to the steps there were (least squares with exponential weights)."""

    _weight: float = 0.0
    _tokens: float = 0.0
    _seconds: float = 0.0
    _squares: float = 0.0
    _products: float = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        if self._weight > 1 and seconds > OUTLIER * (expected := self.expected(tokens)) > 0:
            seconds = OUTLIER * expected
        self._weight = MEMORY * self._weight + 1
        self._tokens = MEMORY * self._tokens + tokens
        self._seconds = MEMORY * self._seconds + seconds
        self._squares = MEMORY * self._squares + tokens * tokens
        self._products = MEMORY * self._products + tokens * seconds

    def fit(self) -> tuple[float, float]:
        """(fixed, per token), neither negative; zeros before the first step."""
        if not self._weight:
            return 0.0, 0.0
        tokens, seconds = self._tokens / self._weight, self._seconds / self._weight
        variance = self._squares / self._weight - tokens * tokens
        covariance = self._products / self._weight - tokens * seconds
        slope = covariance / variance if variance > 1e-6 * tokens * tokens else seconds / tokens
        slope = min(max(slope, 0.0), seconds / tokens)
        return seconds - slope * tokens, slope

    def expected(self, tokens: int) -> float:
        fixed, per_token = self.fit()
        return fixed + per_token * tokens


@dataclass(slots=True)
class CostModel:
    """Decides what a request that yields does, and how many tokens a step takes beside running streams."""

    config: EngineConfig
    steps: StepTimes = field(default_factory=StepTimes)
    copy_rate: float = COPY_RATE  # bytes a second
    copies: int = 0  # that were measured

    def observe_copy(self, blocks: int, seconds: float) -> None:
        if seconds > 0 and self.config.block_bytes:
            self.copies += 1
            rate = blocks * self.config.block_bytes / seconds
            self.copy_rate += (rate - self.copy_rate) / min(self.copies, RECENT)

    def prefers_swap(self, blocks: int) -> bool:
        """Whether copying `blocks` there and back takes less time than computing their tokens again."""
        if self.config.preemption is not Preemption.AUTO:
            return self.config.preemption is Preemption.SWAP
        copying = 2 * blocks * self.config.block_bytes / self.copy_rate
        fixed, per_token = self.steps.fit()
        tokens = blocks * BLOCK_SIZE
        computing = tokens * (per_token + fixed / self.config.max_step_tokens)
        return copying < computing

    def budget(self, streams: int) -> int:
        """Tokens of the next step, of which each of `streams` waits for one.

        So many that they get it within the target; but never so few that reading a prompt would mostly be the fixed
        part of its steps.
        """
        most, target = self.config.max_step_tokens, self.config.target_latency
        fixed, per_token = self.steps.fit()
        if not streams or not target or not per_token:
            return most
        tokens = max((AIM * target - fixed) / per_token, SPARED * fixed / per_token)
        return min(most, max(BLOCK_SIZE, int(tokens)) + streams)
