"""Requests: plain data about one sequence, its origin, and the events that answer it.

A request has no phases. It has tokens, of which `num_computed` have keys and values in the cache, and every step
computes some of the others. A prompt, a later chunk of a prompt, and one generated token are the same case.
"""

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.sampling_params import BeamSampling, SamplingParams

if TYPE_CHECKING:
    from engine.grammar import Constraint


class ServiceClass(enum.IntEnum):
    """Priority class of a request; the lowest value comes first. Waiting requests age upward, so none starves."""

    INTERACTIVE = 0  # a user waits: completions in an editor, the chat in a terminal
    NORMAL = 1  # programs that use the endpoint
    BACKGROUND = 2  # batches and titles, which no user waits for


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a request, as far as it affects scheduling and sharing of the KV cache."""

    service: ServiceClass = ServiceClass.NORMAL
    priority: int = 0  # within its class; the highest comes first
    cache_salt: str = ""  # requests with different salts share no cached prefix
    stored: bool = True  # its KV blocks may be written to disk; always False for BACKGROUND
    client: str = ""  # the client program's own name, for people
    reply: str = ""  # the id of the reply, by which its client can stop it

    def __post_init__(self) -> None:
        if self.service is ServiceClass.BACKGROUND:
            object.__setattr__(self, "stored", False)


PROGRAM = Origin()  # the origin of requests that do not specify one


@dataclass(slots=True)
class QueueTimes:
    """The times when a request was queued and first got a slot, in seconds of the scheduler's clock."""

    arrival: float = 0.0
    started: float | None = None


@dataclass(frozen=True, slots=True)
class TokenSources:
    """The sources of the tokens of one or several prompts: a tier of the KV cache, or computation."""

    device: int = 0  # found in the KV cache of the device
    host: int = 0  # found in the host pool, in RAM
    disk: int = 0  # found in files
    computed: int = 0
    restore_seconds: float = 0.0  # time to copy blocks from the host pool and to read them from files
    skipped: int = 0  # computed tokens that are also in files, but were faster to compute than to read

    @property
    def cached(self) -> int:
        """Tokens that did not have to be computed."""
        return self.device + self.host + self.disk

    def __add__(self, other: "TokenSources") -> "TokenSources":
        return TokenSources(
            self.device + other.device,
            self.host + other.host,
            self.disk + other.disk,
            self.computed + other.computed,
            self.restore_seconds + other.restore_seconds,
            self.skipped + other.skipped,
        )


NO_TOKENS = TokenSources()


class RequestStatus(enum.Enum):
    WAITING = enum.auto()  # holds no block of the device pool
    ARRIVING = enum.auto()  # has a slot; its blocks are being copied to the device
    # has a slot; will share its leader's blocks when the step under way has computed their prompt
    FOLLOWING = enum.auto()
    # has a slot; in a step under way, its followers sample their first token and then share its blocks
    LEADING = enum.auto()
    RUNNING = enum.auto()  # has a slot, and its blocks are on the device
    FINISHED = enum.auto()  # its end was reported; it may hold blocks until the steps under way are collected


class FinishReason(enum.Enum):
    STOP = "stop"  # an end token, or a stop token of the request
    LENGTH = "length"  # max_tokens or the context is reached
    ABORT = "abort"
    ERROR = "error"  # its step failed
    GRAMMAR = "grammar"  # its grammar is too complex, or allows no further token


@dataclass(slots=True, eq=False, weakref_slot=True)
class Request:
    """One sequence being generated. The caller sets the first block of fields, the scheduler owns the others.

    Invariant: num_computed <= num_scheduled <= num_tokens + the tokens that steps under way will sample. The tokens
    between the first two are being computed by steps under way.
    """

    id: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    end_ids: frozenset[int] = frozenset()  # the model's end-of-generation tokens
    origin: Origin = PROGRAM

    output_ids: list[int] = field(default_factory=list)  # sampled tokens
    num_computed: int = 0  # tokens whose keys and values are in the cache
    num_scheduled: int = 0  # computed tokens, and those of steps under way
    cache: TokenSources = NO_TOKENS  # sources of its prompt when it first started
    num_preemptions: int = 0
    queue: QueueTimes = field(default_factory=QueueTimes)
    num_prompt_logprobs: int = 0  # prompt positions whose log-probabilities were returned, or are under way
    status: RequestStatus = RequestStatus.WAITING
    constraint: "Constraint | None" = field(default=None, repr=False)  # state of the reply within its grammar

    @property
    def has_slot(self) -> bool:
        """Whether it has one of the slots."""
        return self.status not in (RequestStatus.WAITING, RequestStatus.FINISHED)

    @property
    def num_cached(self) -> int:
        """Tokens of the prompt that were cached when it first started."""
        return self.cache.cached

    @property
    def queue_seconds(self) -> float:
        """Seconds that it waited before it first got a slot."""
        return 0.0 if self.queue.started is None else self.queue.started - self.queue.arrival

    @property
    def runs_ahead(self) -> bool:
        """Whether its next step can be launched while its last token is still being sampled."""
        # A beam's next token is known only when all beams have delivered. Grammar masks and penalties depend on the
        # token before.
        return self.constraint is None and not self.params.needs_reply and not isinstance(self.params, BeamSampling)

    @property
    def num_tokens(self) -> int:
        """Number of known tokens: prompt and output."""
        return len(self.prompt_ids) + len(self.output_ids)

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Return tokens start..stop of prompt and output, without joining the two."""
        prompt = len(self.prompt_ids)
        return [*self.prompt_ids[start:stop], *self.output_ids[max(0, start - prompt) : max(0, stop - prompt)]]

    def logprob_positions(self, start: int, stop: int) -> range:
        """Return the positions from start to stop that predict a prompt token and have not been reported yet."""
        if self.params.prompt_logprobs is None:
            return range(0)
        first = max(start, self.num_prompt_logprobs)
        return range(first, max(first, min(stop, len(self.prompt_ids) - 1)))


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities under the model's own distribution, before penalties, temperature, and filters.

    With `SamplingParams.drawn_logprobs`, they are those after all of these.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, logprob), most likely first


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One new token of a request, its end, or both. Neither: a part of its prompt was computed."""

    request_id: int
    token_id: int | None
    logprobs: TokenLogprobs | None = None
    finish: FinishReason | None = None
    error: str = ""  # reason for FinishReason.ERROR and GRAMMAR
    num_computed: int = 0  # computed tokens of the request, if a part of its prompt was computed
    # log-probabilities of further prompt tokens, starting with the second token
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
