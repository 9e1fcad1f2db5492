"""A step: its limits, the scheduler's plan, the runner's results, and the runner's interface."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from engine.config import GroupConfig
from engine.draft import NO_DRAFT, Draft
from engine.request import FinishReason, Request, TokenLogprobs

TicketT = TypeVar("TicketT")


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A copy of one block of a KV group, made before the step computes. Copies are made in the order of the plan.

    In a group of states, nothing is copied: the step reads the state `source` and writes the state `target`.
    """

    group: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """A request's part in one step: the tokens start .. start + num_tokens."""

    request: Request
    start: int
    num_tokens: int  # drafted tokens included
    samples: bool  # whether the step reaches the request's last token, so that the next token can be sampled
    # block ids in order, one list per KV group; the scheduler keeps extending the lists
    block_tables: tuple[list[int], ...] = ()
    # whether the previous step is still sampling the request's last token, so that the runner must insert it
    needs_pending_token: bool = False
    logprob_positions: range = range(0)  # prompt positions at which log-probabilities of the next token are requested
    copies: tuple[BlockCopy, ...] = ()
    # requests with the same prompt, which sample their first token from the same logits
    followers: tuple[Request, ...] = ()
    # Tokens after the last known one that may turn out right. Those that are sampled in order are accepted.
    draft: Draft = NO_DRAFT

    @property
    def drafted(self) -> tuple[int, ...]:
        """The drafted token ids."""
        return self.draft.token_ids

    @property
    def num_known(self) -> int:
        """Number of tokens of the part that are not drafted."""
        return self.num_tokens - len(self.drafted)

    @property
    def num_rows(self) -> int:
        """Number of logit rows: reported positions, then the tokens after which the part samples a token."""
        return len(self.logprob_positions) + self.samples * len(self.draft.samples)

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens

    @property
    def sampling_requests(self) -> "tuple[Request, ...]":
        """The requests that sample a token from the logits of the part's last token. Meaningful only if `samples` is
        true.
        """
        return (self.request, *self.followers)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The requests of one step. The scheduler makes the plan, and the runner executes it."""

    scheduled: tuple[ScheduledRequest, ...]
    preempted: tuple[Request, ...] = ()  # requests that were preempted to make this step possible

    @property
    def num_tokens(self) -> int:
        return sum(part.num_tokens for part in self.scheduled)

    @property
    def num_drafted(self) -> int:
        return sum(len(part.drafted) for part in self.scheduled)

    def copies(self, groups: Sequence[GroupConfig]) -> Iterator[BlockCopy]:
        """Yield the copies to make before the step: those of groups without states."""
        for part in self.scheduled:
            yield from (copy for copy in part.copies if not groups[copy.group].recurrent)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One token that a step sampled for a request. A request whose drafted tokens were accepted gets several, in order.

    `token_id` is None if only prompt log-probabilities are reported, or on failure.
    """

    request_id: int
    token_id: int | None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # log-probabilities for the part's `logprob_positions`
    problem: str = ""  # the reason why no token was sampled; it ends the request
    reason: FinishReason = FinishReason.ERROR  # finish reason if there is a problem


UNLIMITED = 1 << 30


@dataclass(slots=True)
class StepLimits:
    """The limits of the next step, which are reduced when steps run out of memory."""

    requests: int = UNLIMITED
    tokens: int = UNLIMITED
    _failures: int = 0  # number of failures since the last step that succeeded

    def halve(self, plan: StepPlan) -> bool:
        """Halve the limits after a step with this plan ran out of memory. Returns False if the step cannot be smaller.

        The first failure changes no limits: a retry may succeed, because the runner has freed its caches.
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
        """Double the limits, because a step has succeeded."""
        self._failures = 0
        self.requests, self.tokens = min(UNLIMITED, 2 * self.requests), min(UNLIMITED, 2 * self.tokens)


class Runner(Protocol[TicketT]):
    """Executes plans in the order of their launch. Tickets must be collected in the same order."""

    @property
    def failed_captures(self) -> int:
        """Number of times that a step could not be captured as a CUDA graph, so that it ran slower."""
        ...

    @property
    def preparations(self) -> int:
        """Number of kernels compiled or loaded, and of graphs captured, so far. A step that needs some is slow once."""
        ...

    def launch(self, plan: StepPlan) -> TicketT:
        """Start a step. The device runs it after the steps under way."""
        ...

    def collect(self, ticket: TicketT) -> list[SampledToken]:
        """Wait for a step, and return a result for each request that samples or reports log-probabilities."""
        ...

    def recover(self) -> None:
        """Recover from exhausted memory: wait for all launched steps, and free caches that only serve speed."""
        ...

    def close(self) -> None:
        """Wait for all launched steps, stop the threads, and free the memory. Nothing may be launched afterwards."""
        ...
