"""Requests: plain data about one sequence, its origin, and the events that report its progress.

A request has no separate prefill and decode phases. It has tokens, of which the first `num_computed` have keys and
values in the cache, and every step computes some of the others. Prefilling a prompt, prefilling a later chunk, and
decoding one token are the same operation.
"""

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.draft import NO_DRAFTS, DraftCounts
from engine.sampling_params import BeamSampling, SamplingParams

if TYPE_CHECKING:
    from engine.grammar import Constraint


class ServiceClass(enum.IntEnum):
    """Priority class of a request; the lowest value is served first. Waiting requests age upward, so none starves."""

    INTERACTIVE = 0  # a user waits for the reply: completions in an editor, the chat in a terminal
    NORMAL = 1  # programs that use the endpoint
    BACKGROUND = 2  # batches and chat titles, for which no user waits


@dataclass(frozen=True, slots=True)
class Origin:
    """The properties of a request's sender that affect scheduling and sharing of the KV cache."""

    service: ServiceClass = ServiceClass.NORMAL
    priority: int = 0  # rank within the class; the highest is served first
    cache_salt: str = ""  # requests with different salts share no cached prefix
    stored: bool = True  # whether its KV blocks may be written to disk; always False for BACKGROUND
    client: str = ""  # name under which the client program identifies itself, shown to users
    reply: str = ""  # id of the reply, which its client can use to stop it

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
    """The sources of the tokens of one or several prompts: a tier of the KV cache, or computation.

    All fields except `restore_seconds` are numbers of tokens.
    """

    device: int = 0  # tokens found in the device's KV cache
    host: int = 0  # tokens found in the host pool, in RAM
    disk: int = 0  # tokens found in files
    computed: int = 0
    restore_seconds: float = 0.0  # seconds to copy blocks from the host pool and to read them from files
    skipped: int = 0  # computed tokens that are also in files, but were faster to compute than to read

    @property
    def cached(self) -> int:
        """Number of tokens that did not have to be computed."""
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
    WAITING = enum.auto()  # holds no slot and no block of the device pool
    ARRIVING = enum.auto()  # has a slot; its blocks are being copied to the device
    # has a slot; shares its leader's blocks once the step under way has computed their common prompt
    FOLLOWING = enum.auto()
    # has a slot; in a step under way, its followers sample their first token from its logits, and then share its blocks
    LEADING = enum.auto()
    RUNNING = enum.auto()  # has a slot, and its blocks are on the device
    FINISHED = enum.auto()  # has ended; it may hold blocks until the steps under way are collected


class FinishReason(enum.Enum):
    STOP = "stop"  # the model's end token, or a stop token of the request, was sampled
    LENGTH = "length"  # the reply reached max_tokens or the end of the context
    ABORT = "abort"
    ERROR = "error"  # the request's step failed
    GRAMMAR = "grammar"  # the request's grammar is too complex, or allows no further token


@dataclass(slots=True, eq=False, weakref_slot=True)
class Request:
    """One sequence being generated. The caller sets the first group of fields; the scheduler owns the others.

    Invariant: num_computed <= num_scheduled <= num_tokens + the number of tokens that steps under way will sample.
    Steps under way are computing the tokens between num_computed and num_scheduled.
    """

    id: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    end_ids: frozenset[int] = frozenset()  # end-of-generation tokens of the model
    origin: Origin = PROGRAM
    # numbers of prompt tokens after which later prompts may differ, ascending: at the end of its first message, and of
    # each question
    marks: tuple[int, ...] = ()

    output_ids: list[int] = field(default_factory=list)  # sampled tokens, without the prompt
    num_computed: int = 0  # number of tokens whose keys and values are in the cache
    num_scheduled: int = 0  # number of tokens that are computed or part of a step under way
    cache: TokenSources = NO_TOKENS  # sources of its prompt tokens when it first started
    num_preemptions: int = 0
    num_suspensions: int = 0  # how often another engine continued it
    queue: QueueTimes = field(default_factory=QueueTimes)
    # number of prompt positions whose log-probabilities have been returned or are being computed
    num_prompt_logprobs: int = 0
    drafts: DraftCounts = NO_DRAFTS  # drafted tokens that steps have verified
    status: RequestStatus = RequestStatus.WAITING
    constraint: "Constraint | None" = field(default=None, repr=False)  # state of the reply within its grammar

    @property
    def has_slot(self) -> bool:
        """Whether the request has a slot."""
        return self.status not in (RequestStatus.WAITING, RequestStatus.FINISHED)

    @property
    def num_cached(self) -> int:
        """Number of prompt tokens that were cached when the request first started."""
        return self.cache.cached

    @property
    def queue_seconds(self) -> float:
        """Seconds that the request waited until it first got a slot; 0 if it has not started."""
        return 0.0 if self.queue.started is None else self.queue.started - self.queue.arrival

    @property
    def runs_ahead(self) -> bool:
        """Whether the next step can be launched while the request's last token is still being sampled."""
        # A beam's next token is known only when all beams have delivered. Grammar masks and penalties depend on the
        # previous token.
        return self.constraint is None and not self.params.needs_reply and not isinstance(self.params, BeamSampling)

    @property
    def is_restarted(self) -> bool:
        """Whether it has lost its slot after it had started."""
        return bool(self.num_preemptions or self.num_suspensions)

    @property
    def can_be_suspended(self) -> bool:
        """Whether another engine of the same model could continue the reply. A grammar belongs to one engine."""
        return self.constraint is None and self.params.beams is None

    @property
    def num_tokens(self) -> int:
        """Number of known tokens, in the prompt and the reply."""
        return len(self.prompt_ids) + len(self.output_ids)

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Return tokens start..stop of the prompt and the reply, without joining the whole lists."""
        prompt = len(self.prompt_ids)
        return [*self.prompt_ids[start:stop], *self.output_ids[max(0, start - prompt) : max(0, stop - prompt)]]

    def logprob_positions(self, start: int, stop: int) -> range:
        """Return the positions between start and stop that predict a prompt token and have not been reported yet."""
        if self.params.prompt_logprobs is None:
            return range(0)
        first = max(start, self.num_prompt_logprobs)
        return range(first, max(first, min(stop, len(self.prompt_ids) - 1)))


def message_ends(prompt_ids: Sequence[int], end_ids: Collection[int]) -> tuple[int, ...]:
    """Return the numbers of tokens at the ends of all messages of a prompt.

    A chat template ends each message with a token that also ends a reply. The prompt encoder makes no such token of a
    user's text.
    """
    return tuple(number for number, token_id in enumerate(prompt_ids, 1) if token_id in end_ids)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The natural-log probabilities of one token and its alternatives.

    They refer to the model's own distribution, before penalties, temperature, and filters. With
    `SamplingParams.drawn_logprobs`, they refer to the distribution after all of these.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, logprob), most likely first


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One new token of a request, its end, or both. An event with neither reports progress of the prefill."""

    request_id: int
    token_id: int | None
    logprobs: TokenLogprobs | None = None
    finish: FinishReason | None = None
    error: str = ""  # the reason, for FinishReason.ERROR and FinishReason.GRAMMAR
    num_computed: int = 0  # number of computed tokens of the request, in an event about prefill progress
    # log-probabilities of further prompt tokens, starting with the second token
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
