"""CostModel: the measured cost of steps and copies on this machine, and decisions that depend on it.

The time of a step is modeled as a fixed cost plus a cost per token. Recent steps have more weight, so both costs follow
the current load.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass, field

from engine.config import BLOCK_SIZE, EngineConfig, Preemption, Restore

FEW_TOKENS = 16  # a step with at most this number of tokens takes about the fixed cost
# weight of the latest step in an average; it is high, because the cost per token grows during a long prefill
WEIGHT = 0.3
COPY_RATE = 4e9  # assumed bytes per second until a copy has been measured
READ_RATE = 1e9  # assumed bytes per second from files until a read has been measured
READ_LATENCY = 0.003  # assumed seconds until the first byte arrives
# the assumed read rate grows by this factor whenever a read is skipped, so that reading is tried again
READ_RATE_GROWTH = 1.05
# assumed time of each further token in a small step, as a share of the time of a step with one token
TOKEN_SHARE = 0.2
MAX_SMALL = 64  # largest step, in tokens, whose time is kept separately
FRESH = 1000  # a time is dropped if it was not measured in this number of small steps
RECENT_DECODES = 64  # approximate number of steps in the average time of a decode step
RECENT = 8  # approximate number of copies in the average rate
OUTLIER = 4.0  # multiple of the expected time above which another program is assumed to have slowed the step
# share of the target latency that a step may take; step times vary, and most steps must stay below the target
LATENCY_FRACTION = 0.5
# Minimum compute time of a chunk, as a multiple of a step's fixed cost. The fixed costs are then at most a fifth of the
# prefill time.
MIN_CHUNK_RATIO = 4.0


@dataclass(slots=True)
class SmallSteps:
    """The measured time of steps with at most MAX_SMALL tokens, by their number of tokens."""

    _seconds: dict[int, float] = field(default_factory=dict)
    _measured: dict[int, int] = field(default_factory=dict)  # number of tokens -> value of `_steps` when last measured
    _sizes: list[int] = field(default_factory=list)  # the measured numbers of tokens, in order
    _steps: int = 0

    def observe(self, tokens: int, seconds: float) -> None:
        if tokens > MAX_SMALL:
            return
        self._steps += 1
        if known := self._seconds.get(tokens, 0.0):
            self._seconds[tokens] = _moving_average(known, min(seconds, OUTLIER * known))
        elif self._sizes:  # The first time of a rare size counts for long, and may be disturbed.
            implied = self.expected(tokens)
            self._seconds[tokens] = (implied + min(seconds, OUTLIER * implied)) / 2
        else:
            self._seconds[tokens] = seconds
        self._measured[tokens] = self._steps
        if tokens not in self._sizes or self._steps % FRESH == 0:
            self._sizes = sorted(size for size, step in self._measured.items() if step > self._steps - FRESH)

    def expected(self, tokens: int) -> float:
        """Return the expected time of a step. Without any measurement, it is relative to a step with one token.

        Between two measured sizes the time is interpolated; outside of them it grows by TOKEN_SHARE per token.
        """
        index = bisect_left(self._sizes, tokens)
        lower, upper = self._sizes[max(0, index - 1) : index], self._sizes[index : index + 1]
        if upper == [tokens]:
            return self._seconds[tokens]
        if lower and upper:
            first, second = self._seconds[lower[0]], self._seconds[upper[0]]
            return first + (second - first) * (tokens - lower[0]) / (upper[0] - lower[0])
        size = (lower or upper or [1])[0]
        return self._seconds.get(size, 1.0) * _relative(tokens) / _relative(size)


def _relative(tokens: int) -> float:
    """Return the assumed time of a small step, relative to a step with one token."""
    return 1.0 + TOKEN_SHARE * (tokens - 1)


@dataclass(slots=True)
class StepTimes:
    """A linear model of step times: seconds = fixed + per_token * tokens.

    `fixed` is measured with small steps, `per_token` with larger ones. `decode` is the average of steps with one token;
    0 before the first one.
    """

    fixed: float = 0.0
    per_token: float = 0.0
    decode: float = 0.0
    decodes: int = 0  # number of steps with one token
    small: SmallSteps = field(default_factory=SmallSteps)

    def observe(self, tokens: int, seconds: float, drafted: int = 0) -> None:
        """Record the time of a step with `tokens` tokens, of which `drafted` were drafts to verify."""
        self.small.observe(tokens, seconds)
        if drafted:  # such a step has few requests and takes more than the fixed cost
            return
        if 0 < OUTLIER * self.expected(tokens) < seconds:
            seconds = OUTLIER * self.expected(tokens)
        if tokens == 1:
            self.decodes += 1
            self.decode += (seconds - self.decode) / min(self.decodes, RECENT_DECODES)
        if tokens <= FEW_TOKENS:
            self.fixed = _moving_average(self.fixed, seconds)
        else:
            self.per_token = _moving_average(self.per_token, max(0.0, seconds - self.fixed) / tokens)

    def expected(self, tokens: int) -> float:
        """Return the expected seconds of a step; 0 if no step of a similar size has been measured."""
        if tokens <= FEW_TOKENS:
            return self.fixed
        return self.fixed + self.per_token * tokens if self.per_token else 0.0


def _moving_average(known: float, seen: float) -> float:
    return known + WEIGHT * (seen - known) if known else seen


@dataclass(slots=True)
class CostModel:
    """Decides between swapping and recomputing, between reading and computing, and on the token budget of a step."""

    config: EngineConfig
    steps: StepTimes = field(default_factory=StepTimes)
    copy_rate: float = COPY_RATE  # bytes per second between the pools
    copies: int = 0  # number of measured copies
    read_rate: float = READ_RATE  # bytes per second from files
    reads: int = 0

    def observe_copy(self, num_bytes: int, seconds: float) -> None:
        """Record a copy of blocks between the pools."""
        if seconds > 0 and num_bytes:
            self.copies += 1
            self.copy_rate += (num_bytes / seconds - self.copy_rate) / min(self.copies, RECENT)

    def observe_read(self, num_bytes: int, seconds: float) -> None:
        """Record a read of blocks from files."""
        if num_bytes and seconds > READ_LATENCY:
            self.reads += 1
            self.read_rate += (num_bytes / (seconds - READ_LATENCY) - self.read_rate) / min(self.reads, RECENT)

    def prefers_read(self, num_bytes: int, blocks: int) -> bool:
        """Whether reading `num_bytes` bytes from files is faster than computing the tokens of `blocks` blocks."""
        if self.config.restore is Restore.ALWAYS or not self.steps.per_token:
            return True
        faster = READ_LATENCY + num_bytes / self.read_rate < self._compute_seconds(blocks)
        self.read_rate *= 1.0 if faster else READ_RATE_GROWTH
        return faster

    def _compute_seconds(self, blocks: int) -> float:
        """Return the expected seconds for prefilling `blocks` blocks."""
        return blocks * BLOCK_SIZE * (self.steps.per_token + self.steps.fixed / self.config.max_step_tokens)

    def prefers_swap(self, num_bytes: int, blocks: int) -> bool:
        """Whether copying `num_bytes` bytes out and back is faster than computing the tokens of `blocks` blocks."""
        if self.config.preemption is not Preemption.AUTO:
            return self.config.preemption is Preemption.SWAP
        return 2 * num_bytes / self.copy_rate < self._compute_seconds(blocks)

    def draft_budget(self, streams: int, known: int, most: int) -> int:
        """Return how many drafted tokens, at most `most`, the next step may verify while `streams` requests decode.

        `known` is the number of its other tokens. If there are several streams, the step must stay within the target
        latency, or it verifies none.
        """
        most, longest = min(most, MAX_SMALL - known), self.longest_step(streams)
        while most > 0 and self.steps.small.expected(known + most) > longest:
            most -= 1
        return max(0, most)

    def longest_step(self, streams: int) -> float:
        """Return the maximum seconds of a step with drafts while `streams` requests decode: the target latency if there
        are several.
        """
        return self.config.target_latency or math.inf if streams > 1 else math.inf

    def token_budget(self, streams: int, other_streams: int = 0) -> int:
        """Return the token budget of the next step while `streams` requests each wait for one token of it.

        Another `other_streams` requests, of other engines, wait for the end of the step.

        The budget keeps the step within the target latency. However, it is never so small that the fixed cost of steps
        takes most of the prefill time.
        """
        most, target = self.config.max_step_tokens, self.config.target_latency
        fixed, per_token = self.steps.fixed, self.steps.per_token
        if not streams + other_streams or not target or not per_token:
            return most
        tokens = max((LATENCY_FRACTION * target - fixed) / per_token, MIN_CHUNK_RATIO * fixed / per_token)
        return min(most, max(BLOCK_SIZE, int(tokens)) + streams)
