"""A step: its limits, the plan that the scheduler makes, the runner's results, and the runner's interface."""

from dataclasses import dataclass
from typing import Protocol, TypeVar

from engine.request import FinishReason, Request, TokenLogprobs

TicketT = TypeVar("TicketT")


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A block of a KV group that is copied before the step computes, in the order of the plan."""

    group: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """A request's part in one step: its tokens start .. start + num_tokens."""

    request: Request
    start: int
    num_tokens: int
    samples: bool  # the step reaches the request's last token, so the next one can be sampled
    block_tables: tuple[list[int], ...] = ()  # per KV group: the request's blocks in order; the lists keep growing
    needs_pending_token: bool = False  # the step before still samples its last token: the runner inserts it
    logprob_positions: range = range(0)  # prompt positions whose log-probabilities of the next token are wanted
    copies: tuple[BlockCopy, ...] = ()
    # requests with the same prompt, which sample their first token from the same logits
    followers: tuple[Request, ...] = ()

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens

    @property
    def sampling_requests(self) -> "tuple[Request, ...]":
        """The requests that sample a token from the logits of the part's last token, if the part samples."""
        return (self.request, *self.followers)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The requests of one step. Made by the scheduler, run by the runner."""

    scheduled: tuple[ScheduledRequest, ...]
    preempted: tuple[Request, ...] = ()  # requests that were preempted for this step

    @property
    def num_tokens(self) -> int:
        return sum(part.num_tokens for part in self.scheduled)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The result of a step for one request. `token_id` is None if it reports only on the prompt, or failed."""

    request_id: int
    token_id: int | None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # for the part's `logprob_positions`
    problem: str = ""  # why there is no token; the request ends with it
    reason: FinishReason = FinishReason.ERROR  # finish reason for a problem


UNLIMITED = 1 << 30


@dataclass(slots=True)
class StepLimits:
    """The limits of the next step, which shrink when steps run out of memory."""

    requests: int = UNLIMITED
    tokens: int = UNLIMITED
    _failures: int = 0  # failures since the last step that succeeded

    def halve(self, plan: StepPlan) -> bool:
        """Halve the next step after this plan ran out of memory. Returns False if it cannot be smaller.

        The first failure only causes a retry, because the runner has freed its caches meanwhile.
        """
        self._failures += 1
        if self._failures == 1:
            return True
        if len(plan.scheduled) > 1:
            self.requests = len(plan.scheduled) // 2
        elif plan.num_tokens > 1:
            self.tokens = plan.num_tokens // 2
        else:
            return False
        return True

    def restore(self) -> None:
        """Relax the limits after a step succeeded."""
        self._failures = 0
        self.requests, self.tokens = min(UNLIMITED, 2 * self.requests), min(UNLIMITED, 2 * self.tokens)


class Runner(Protocol[TicketT]):
    """Runs plans in the order of their launch. Tickets are collected in the same order."""

    def launch(self, plan: StepPlan) -> TicketT:
        """Start a step. On the device it runs after the steps under way."""
        ...

    def collect(self, ticket: TicketT) -> list[SampledToken]:
        """Wait for a step, and return a result for each request that samples or reports."""
        ...

    def recover(self) -> None:
        """Recover from a lack of memory: wait for all launched steps, and free caches that are only kept for speed."""
        ...
