"""A step: the plan that the scheduler makes, what the runner returns for it, and the runner's interface."""

from dataclasses import dataclass
from typing import Protocol, TypeVar

from engine.request import FinishReason, Request, TokenLogprobs

TicketT = TypeVar("TicketT")


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A block of a KV group that a step copies before it computes, in the order of the plan."""

    group: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """A request's part in one step: its tokens start .. start + num_tokens."""

    request: Request
    start: int
    num_tokens: int
    samples: bool  # the step reaches the request's last token, so that its next one can be picked
    block_tables: tuple[list[int], ...] = ()  # of each KV group: the request's blocks in order, which go on growing
    needs_pending_token: bool = False  # the step before still samples its last token: the runner inserts it
    logprob_positions: range = range(0)  # prompt positions whose log-probabilities of the next token are wanted
    copies: tuple[BlockCopy, ...] = ()
    followers: tuple[Request, ...] = ()  # pick a first token of their own from the same logits

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens

    @property
    def sampling_requests(self) -> "tuple[Request, ...]":
        """Those that pick a token from the logits of its last one, where it samples."""
        return (self.request, *self.followers)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step runs. Made by the scheduler, run by the runner."""

    scheduled: tuple[ScheduledRequest, ...]
    preempted: tuple[Request, ...] = ()  # gave their blocks back for it

    @property
    def num_tokens(self) -> int:
        return sum(part.num_tokens for part in self.scheduled)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """What the runner found for one request of a step. `token_id` is None where the step only reports on the prompt, or
    there is none to be had."""

    request_id: int
    token_id: int | None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the tokens behind the positions that were to be reported
    problem: str = ""  # why there is no token to be had: the request ends with it
    reason: FinishReason = FinishReason.ERROR  # for a problem


UNLIMITED = 1 << 30


@dataclass(slots=True)
class StepLimits:
    """The limits of the next step."""

    requests: int = UNLIMITED
    tokens: int = UNLIMITED
    _failures: int = 0  # since the last step that succeeded

    def halve(self, plan: StepPlan) -> bool:
        """A step has failed for want of memory: half of it next time. False where there is nothing to halve.

        The first time it may just be tried again: memory that was kept for speed has been given back meanwhile.
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
        """A step has succeeded."""
        self._failures = 0
        self.requests, self.tokens = min(UNLIMITED, 2 * self.requests), min(UNLIMITED, 2 * self.tokens)


class Runner(Protocol[TicketT]):
    """Computes plans in the order they are launched; tickets are collected in that order too."""

    def launch(self, plan: StepPlan) -> TicketT:
        """Start a step. With steps before it under way, it follows them on the device."""
        ...

    def collect(self, ticket: TicketT) -> list[SampledToken]:
        """Wait for a step: what it found for each part of its plan that samples or reports."""
        ...

    def recover(self) -> None:
        """Memory has run out: wait for what was launched, and give back what is only kept for speed."""
        ...
