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
READ_BEGINS = 0.003  # seconds before the first byte is there
FORGETS = 1.05  # what was slow once is tried again: the rate grows by so much whenever files are left alone for it
RECENT = 8  # copies that the rate is the mean of, about
OUTLIER = 4.0  # times the expected time: somebody else had the machine
AIM = 0.5  # of the target: steps differ, and hardly any should take longer
SPARED = 4.0  # a chunk takes at least this many times the fixed part of a step: a fifth of a prompt's time at most


@dataclass(slots=True)
class StepTimes:
    """seconds = fixed + per_token * tokens: the first from steps of few tokens, the second from larger ones."""

    fixed: float = 0.0
    per_token: float = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        if 0 < OUTLIER * self.expected(tokens) < seconds:
            seconds = OUTLIER * self.expected(tokens)
        if tokens <= FEW_TOKENS:
            self.fixed = _blend(self.fixed, seconds)
        else:
            self.per_token = _blend(self.per_token, max(0.0, seconds - self.fixed) / tokens)

    def expected(self, tokens: int) -> float:
        """Seconds of a step; 0 before there was one of about that size."""
        if tokens <= FEW_TOKENS:
            return self.fixed
        return self.fixed + self.per_token * tokens if self.per_token else 0.0


def _blend(known: float, seen: float) -> float:
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
        if num_bytes and seconds > READ_BEGINS:
            self.reads += 1
            self.read_rate += (num_bytes / (seconds - READ_BEGINS) - self.read_rate) / min(self.reads, RECENT)

    def prefers_reading(self, blocks: float, instead_of: int) -> bool:
        """Whether reading `blocks` from files takes less time than computing the tokens of `instead_of`."""
        if self.config.restore is Restore.ALWAYS or not self.steps.per_token:
            return True
        reading = READ_BEGINS + blocks * self.config.block_bytes / self.read_rate
        faster = reading < self._computing(instead_of)
        self.read_rate *= 1.0 if faster else FORGETS
        return faster

    def _computing(self, blocks: int) -> float:
        """Seconds."""
        return blocks * BLOCK_SIZE * (self.steps.per_token + self.steps.fixed / self.config.max_step_tokens)

    def prefers_swap(self, blocks: int) -> bool:
        """Whether copying `blocks` there and back takes less time than computing their tokens again."""
        if self.config.preemption is not Preemption.AUTO:
            return self.config.preemption is Preemption.SWAP
        copying = 2 * blocks * self.config.block_bytes / self.copy_rate
        return copying < self._computing(blocks)

    def budget(self, streams: int) -> int:
        """Tokens of the next step, of which each of `streams` waits for one.

        So many that they get it within the target; but never so few that reading a prompt would mostly be the fixed
        part of its steps.
        """
        most, target = self.config.max_step_tokens, self.config.target_latency
        fixed, per_token = self.steps.fixed, self.steps.per_token
        if not streams or not target or not per_token:
            return most
        tokens = max((AIM * target - fixed) / per_token, SPARED * fixed / per_token)
        return min(most, max(BLOCK_SIZE, int(tokens)) + streams)
