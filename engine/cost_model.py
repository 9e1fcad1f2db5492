"""What steps and copies cost on this machine, learnt from those there were, and the two decisions that follow from it.

The time of a step is a fixed part and a part for each token; both follow the machine as it is now, since older steps
count less. Knows sizes and seconds. Refuses to know requests.
"""

from dataclasses import dataclass, field

from engine.config import BLOCK_SIZE, EngineConfig, Preemption, Restore

FEW_TOKENS = 16  # a step of so many costs about what it costs anyway
WEIGHT = 0.3  # of the latest step: what a token costs grows while a long prompt is read
COPY_RATE = 4e9  # bytes a second, until a copy was measured
READ_RATE = 1e9  # bytes a second from files, until they were read
READ_LATENCY = 0.003  # seconds before the first byte is there
READ_RATE_GROWTH = 1.05  # factor on the read rate each time reading is skipped, so that reading is tried again
RECENT = 8  # copies that the rate is the mean of, about
OUTLIER = 4.0  # times the expected time: somebody else had the machine
LATENCY_FRACTION = 0.5  # of the target: steps differ, and hardly any should take longer
# Least compute time of a chunk, in fixed costs of a step, which are then at most a fifth of the prefill time.
MIN_CHUNK_RATIO = 4.0


@dataclass(slots=True)
class StepTimes:
    """seconds = fixed + per_token * tokens: the first from steps of few tokens, the second from larger ones."""

    fixed: float = 0.0
    per_token: float = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        if 0 < OUTLIER * self.expected(tokens) < seconds:
            seconds = OUTLIER * self.expected(tokens)
        if tokens <= FEW_TOKENS:
            self.fixed = _moving_average(self.fixed, seconds)
        else:
            self.per_token = _moving_average(self.per_token, max(0.0, seconds - self.fixed) / tokens)

    def expected(self, tokens: int) -> float:
        """Seconds of a step; 0 before there was one of about that size."""
        if tokens <= FEW_TOKENS:
            return self.fixed
        return self.fixed + self.per_token * tokens if self.per_token else 0.0


def _moving_average(known: float, seen: float) -> float:
    return known + WEIGHT * (seen - known) if known else seen


@dataclass(slots=True)
class CostModel:
    """Decides whether a preempted request is swapped out, and how many tokens a step takes beside running streams."""

    config: EngineConfig
    steps: StepTimes = field(default_factory=StepTimes)
    copy_rate: float = COPY_RATE  # bytes a second
    copies: int = 0  # that were measured
    read_rate: float = READ_RATE  # bytes a second
    reads: int = 0

    def observe_copy(self, blocks: int, seconds: float) -> None:
        if seconds > 0 and self.config.block_bytes:
            self.copies += 1
            rate = blocks * self.config.block_bytes / seconds
            self.copy_rate += (rate - self.copy_rate) / min(self.copies, RECENT)

    def observe_read(self, num_bytes: int, seconds: float) -> None:
        """Blocks were read from files."""
        if num_bytes and seconds > READ_LATENCY:
            self.reads += 1
            self.read_rate += (num_bytes / (seconds - READ_LATENCY) - self.read_rate) / min(self.reads, RECENT)

    def prefers_read(self, blocks: float, instead_of: int) -> bool:
        """Whether reading `blocks` from files takes less time than computing the tokens of `instead_of`."""
        if self.config.restore is Restore.ALWAYS or not self.steps.per_token:
            return True
        reading = READ_LATENCY + blocks * self.config.block_bytes / self.read_rate
        faster = reading < self._compute_seconds(instead_of)
        self.read_rate *= 1.0 if faster else READ_RATE_GROWTH
        return faster

    def _compute_seconds(self, blocks: int) -> float:
        """Seconds."""
        return blocks * BLOCK_SIZE * (self.steps.per_token + self.steps.fixed / self.config.max_step_tokens)

    def prefers_swap(self, blocks: int) -> bool:
        """Whether copying `blocks` there and back takes less time than computing their tokens again."""
        if self.config.preemption is not Preemption.AUTO:
            return self.config.preemption is Preemption.SWAP
        copying = 2 * blocks * self.config.block_bytes / self.copy_rate
        return copying < self._compute_seconds(blocks)

    def token_budget(self, streams: int) -> int:
        """Tokens of the next step, of which each of `streams` waits for one.

        So many that they get it within the target; but never so few that reading a prompt would mostly be the fixed
        part of its steps.
        """
        most, target = self.config.max_step_tokens, self.config.target_latency
        fixed, per_token = self.steps.fixed, self.steps.per_token
        if not streams or not target or not per_token:
            return most
        tokens = max((LATENCY_FRACTION * target - fixed) / per_token, MIN_CHUNK_RATIO * fixed / per_token)
        return min(most, max(BLOCK_SIZE, int(tokens)) + streams)
