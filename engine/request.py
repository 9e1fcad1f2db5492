"""Requests: one sequence each, where it comes from, and the events that answer it. Plain data.

A request has no phases: it has tokens, of which `num_computed` have their keys and values in the cache, and every step
lets it catch up. A prompt, a prompt's later chunk and one generated token are the same case.
"""

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.sampling_params import BeamSampling, SamplingParams

if TYPE_CHECKING:
    from engine.grammar import Constraint


class ServiceClass(enum.IntEnum):
    """Who waits for a reply; the lowest value comes first. What waits long ages upward, so that nothing starves."""

    INTERACTIVE = 0  # a person: completions in an editor, the chat in a terminal
    NORMAL = 1  # programs that use the endpoint
    BACKGROUND = 2  # batches, titles: nobody looks on


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a request comes from, as far as that decides who goes first and who may share what was computed."""

    service: ServiceClass = ServiceClass.NORMAL
    priority: int = 0  # among requests of its class, the highest goes first
    cache_salt: str = ""  # requests of different salts share no cached prefix
    stored: bool = True  # what is computed for it may be written to disk; never for the lowest class
    client: str = ""  # the program that asks, as it names itself; for people
    reply: str = ""  # the id of the reply that it is told in, by which whoever asked may stop it

    def __post_init__(self) -> None:
        if self.service is ServiceClass.BACKGROUND:
            object.__setattr__(self, "stored", False)


PROGRAM = Origin()  # what is assumed of a request that says nothing of itself


@dataclass(slots=True)
class QueueTimes:
    """When a request was queued and when it first got a slot, in seconds of the scheduler's clock."""

    arrival: float = 0.0
    started: float | None = None


@dataclass(frozen=True, slots=True)
class TokenSources:
    """Where the tokens of a prompt, or of several prompts, came from: a tier of the KV cache, or computation."""

    device: int = 0  # found in the KV cache of the device
    host: int = 0  # found in the host pool, in RAM
    disk: int = 0  # found in files
    computed: int = 0
    restore_seconds: float = 0.0  # time to copy blocks from the host pool and to read them from files
    skipped: int = 0  # of the computed ones, those in files: computing them was faster than reading

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
    FOLLOWING = enum.auto()  # has a slot; takes over its leader's blocks when the step under way has read their prompt
    LEADING = enum.auto()  # has a slot; followers pick their first token in a step under way, and share its blocks then
    RUNNING = enum.auto()  # has a slot, and its blocks are on the device
    FINISHED = enum.auto()  # its end was reported; it may hold blocks until the steps under way are collected


class FinishReason(enum.Enum):
    STOP = "stop"  # an end token, or a stop token of the request
    LENGTH = "length"  # max_tokens or the context is reached
    ABORT = "abort"
    ERROR = "error"  # the step it was part of failed
    GRAMMAR = "grammar"  # its grammar is too complex, or allows nothing more


@dataclass(slots=True, eq=False, weakref_slot=True)
class Request:
    """One sequence being generated. The caller fills the first block of fields, the scheduler owns the rest.

    In tokens: num_computed <= num_scheduled <= num_tokens + the tokens that steps under way will sample. Between the
    first two are the tokens of steps under way.
    """

    id: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    end_ids: frozenset[int] = frozenset()  # the model's end-of-generation tokens
    origin: Origin = PROGRAM

    output_ids: list[int] = field(default_factory=list)  # what the runner sampled
    num_computed: int = 0  # tokens whose keys and values are in the cache
    num_scheduled: int = 0  # those, and the tokens of steps under way
    cache: TokenSources = NO_TOKENS  # of its prompt, when it was first admitted
    num_preemptions: int = 0
    queue: QueueTimes = field(default_factory=QueueTimes)
    num_prompt_logprobs: int = 0  # prompt positions whose log-probabilities were returned, or are under way
    status: RequestStatus = RequestStatus.WAITING
    constraint: "Constraint | None" = field(default=None, repr=False)  # how far its reply is in its grammar

    @property
    def has_slot(self) -> bool:
        """Whether it is one of the requests that run."""
        return self.status not in (RequestStatus.WAITING, RequestStatus.FINISHED)

    @property
    def num_cached(self) -> int:
        """Tokens of the prompt that were found computed when it first joined."""
        return self.cache.cached

    @property
    def queue_seconds(self) -> float:
        """How long it waited before it first had a slot."""
        return 0.0 if self.queue.started is None else self.queue.started - self.queue.arrival

    @property
    def runs_ahead(self) -> bool:
        """Whether its next step can be launched while its last token is still being sampled."""
        # The next token of a beam is known when all beams have delivered; the tokens that a grammar allows, and those
        # that are penalized, when the one before is known.
        return self.constraint is None and not self.params.needs_reply and not isinstance(self.params, BeamSampling)

    @property
    def num_tokens(self) -> int:
        """Tokens that are known: prompt and output."""
        return len(self.prompt_ids) + len(self.output_ids)

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Tokens start..stop of prompt and output together, without joining the two."""
        prompt = len(self.prompt_ids)
        return [*self.prompt_ids[start:stop], *self.output_ids[max(0, start - prompt) : max(0, stop - prompt)]]

    def logprob_positions(self, start: int, stop: int) -> range:
        """The positions from start to stop that predict a token of the prompt, and were not reported before."""
        if self.params.prompt_logprobs is None:
            return range(0)
        first = max(start, self.num_prompt_logprobs)
        return range(first, max(first, min(stop, len(self.prompt_ids) - 1)))


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities by the model alone, before penalties, temperature and filters; or after all of them, if
    the request has `drawn_logprobs`."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, logprob), most likely first


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One new token of a request, or its end, or both; neither, when a part of its prompt was computed."""

    request_id: int
    token_id: int | None
    logprobs: TokenLogprobs | None = None
    finish: FinishReason | None = None
    error: str = ""  # why, for FinishReason.ERROR and GRAMMAR
    num_computed: int = 0  # how far the request is, where a part of its prompt was computed
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of further tokens of the prompt, from its second on
