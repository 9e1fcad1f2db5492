"""The nouns that travel between the scheduler, the runner and whoever asked. Plain data; no torch.

A request has no phases: it has tokens, of which `num_computed` have their keys and values in the cache, and every step
lets it catch up. A prompt, a prompt's later chunk and one generated token are the same case.
"""

import enum
import math
import secrets
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

from engine.errors import InvalidSampling
from engine.token_sources import NONE, TokenSources

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.kv.blocks import BlockKey
    from engine.kv.disk.store import DiskBlock
    from engine.sampling.constraint import Constraint, Grammar
    from engine.scheduling.beam import Beam
    from engine.scheduling.beam_groups import Search

Bounds: TypeAlias = tuple[tuple[str, float, float], ...]  # (field, least, most)

MAX_STOPS = 64  # editors send two dozen
MAX_BIASES = 1024
MAX_LOGPROBS = 20
MAX_WIDTH = 16
MAX_TEMPERATURE = 100.0


@dataclass(frozen=True, slots=True)
class BeamParams:
    """How a beam search goes. Raises InvalidSampling naming the parameter."""

    width: int  # sequences that go on at a time
    results: int = 1  # of them, how many are told: the best
    length_penalty: float = 1.0  # a score is divided by the reply's length to this power; above 0, long ones gain
    # True: ends when `width` sequences have. False: when none that goes on scores higher now than the worst of those.
    # "never": when none can come to do so, however long it gets.
    early_stopping: bool | Literal["never"] = False

    _BOUNDS: ClassVar[Bounds] = (("width", 1, MAX_WIDTH), ("length_penalty", -10, 10))

    def __post_init__(self) -> None:
        _check_bounds(self, self._BOUNDS)
        if not 1 <= self.results <= self.width:
            raise InvalidSampling("results", f"{self.results} is not between 1 and the width, {self.width}")


@dataclass(frozen=True, slots=True)
class DryParams:
    """How tokens that would go on with a repetition become less likely (`sampling.filters`). Raises InvalidSampling,
    the parameter."""

    multiplier: float  # of the penalty
    base: float = 1.75  # that the penalty grows by with each token of the repetition
    allowed_length: int = 2  # tokens of a repetition that costs the multiplier; shorter ones cost nothing
    last_n: int | None = None  # tokens that are looked through; None: all
    breakers: frozenset[int] = frozenset()  # tokens that no repetition goes across

    _BOUNDS: ClassVar[Bounds] = (("multiplier", 0, 100), ("base", 1, 4), ("allowed_length", 0, 2**31 - 1))

    def __post_init__(self) -> None:
        _check_bounds(self, self._BOUNDS)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request picks its tokens. Validated when made; raises InvalidSampling naming the parameter."""

    temperature: float = 1.0  # 0: the most likely token, always
    top_k: int = 0  # keep the k most likely tokens; 0: all
    top_p: float = 1.0  # keep the fewest most likely tokens that reach this probability together
    min_p: float = 0.0  # keep tokens at least this likely, relative to the most likely one
    repetition_penalty: float = 1.0  # divides the positive logits of tokens already seen, multiplies the negative ones
    presence_penalty: float = 0.0  # subtracted once from tokens already generated
    frequency_penalty: float = 0.0  # subtracted for each time a token was generated
    dry: DryParams | None = None  # against repetitions of several tokens
    xtc_probability: float = 0.0  # how often the most likely tokens are left out: see `engine.sampling.filters`
    xtc_threshold: float = 0.1  # how likely those are
    seed: int = field(default_factory=lambda: secrets.randbits(63))
    max_tokens: int | None = None  # None: as many as the context holds
    min_tokens: int = 0  # end and stop tokens are not picked before this many
    ignore_eos: bool = False  # the model's own end tokens do not end the reply
    stop: tuple[str, ...] = ()  # strings that end the reply; applied where ids become text, not here
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit)
    logprobs: int | None = None  # alternatives to report for each token; 0: only the picked one; None: none
    drawn_logprobs: bool = False  # those reports are of what the token is drawn from, not of the model's distribution
    prompt_logprobs: int | None = None  # the same for the tokens of the prompt, which is computed whole for it
    grammar: "Grammar | None" = None  # that the reply is in; it ends the reply, too, whatever else says it must not
    beams: BeamParams | None = None  # nothing is drawn then: temperature and filters mean nothing

    _BOUNDS: ClassVar[Bounds] = (
        ("temperature", 0, MAX_TEMPERATURE),
        ("top_k", 0, 2**31 - 1),
        ("top_p", 0, 1),
        ("min_p", 0, 1),
        ("repetition_penalty", 0.01, 100),
        ("presence_penalty", -100, 100),
        ("frequency_penalty", -100, 100),
        ("xtc_probability", 0, 1),
        ("xtc_threshold", 0, 1),
        ("seed", 0, 2**64 - 1),
        ("max_tokens", 1, 2**31 - 1),
        ("min_tokens", 0, 2**31 - 1),
        ("logprobs", 0, MAX_LOGPROBS),
        ("prompt_logprobs", 0, MAX_LOGPROBS),
    )

    def __post_init__(self) -> None:
        _check_bounds(self, self._BOUNDS)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidSampling("min_tokens", f"{self.min_tokens} is more than max_tokens, {self.max_tokens}")
        if len(self.stop) > MAX_STOPS or any(not text for text in self.stop):
            raise InvalidSampling("stop", f"at most {MAX_STOPS} strings, none of them empty")
        if len(self.logit_bias) > MAX_BIASES:
            raise InvalidSampling("logit_bias", f"{len(self.logit_bias)} entries, more than {MAX_BIASES}")
        if not all(math.isfinite(bias) and abs(bias) <= 100 for _, bias in self.logit_bias):
            raise InvalidSampling("logit_bias", "a bias is not between -100 and 100")
        for name in _SHAPING if self.beams is not None else ():
            if getattr(self, name) != SamplingParams.__dataclass_fields__[name].default:
                raise InvalidSampling(name, "not with a beam search, which ranks by the model alone")

    @property
    def penalizes(self) -> bool:
        """Whether tokens that are there already become less likely."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def needs_reply(self) -> bool:
        """Whether all tokens of the reply must be known before the next is picked."""
        return self.penalizes or self.dry is not None

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise InvalidSampling where a token id is not in the vocabulary. A wrong id must never reach a device."""
        for name, ids in (("logit_bias", [i for i, _ in self.logit_bias]), ("stop_token_ids", self.stop_token_ids)):
            for token_id in ids:
                if not 0 <= token_id < vocab_size:
                    raise InvalidSampling(name, f"token id {token_id} is not in the vocabulary of {vocab_size}")


# What changes the model's own distribution.
_SHAPING = ("logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty", "dry", "grammar")


def _check_bounds(params: object, bounds: Bounds) -> None:
    for name, low, high in bounds:
        value = getattr(params, name)
        if value is not None and not low <= value <= high:  # NaN is not, either
            raise InvalidSampling(name, f"{value} is not between {low} and {high}")


@dataclass(frozen=True, slots=True)
class BeamSampling(SamplingParams):
    """How one beam of a search is read: as many alternatives are reported as the search has to choose from."""

    _BOUNDS: ClassVar[Bounds] = ()


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


class RequestStatus(enum.Enum):
    WAITING = enum.auto()  # holds no block of the device pool
    FOLLOWING = enum.auto()  # has a seat; takes over its leader's blocks when the step under way has read their prompt
    RUNNING = enum.auto()
    FINISHED = enum.auto()  # its end is told; it may hold blocks until the steps under way are collected


class FinishReason(enum.Enum):
    STOP = "stop"  # an end token, or a stop token of the request
    LENGTH = "length"  # max_tokens or the context is reached
    ABORT = "abort"
    ERROR = "error"  # the step it was part of failed
    GRAMMAR = "grammar"  # its grammar is too complex, or allows nothing more


@dataclass(slots=True, eq=False)
class Request:
    """One sequence being generated. The submitter fills the first block of fields, the scheduler owns the rest.

    How far it is, in tokens: num_computed <= num_scheduled <= num_tokens + num_pending. Between the first two lie the
    tokens of steps that are under way; the pending ones are being sampled there, so that nobody knows them yet.
    """

    id: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    end_ids: frozenset[int] = frozenset()  # the model's end-of-generation tokens
    origin: Origin = PROGRAM

    output_ids: list[int] = field(default_factory=list)  # what the runner sampled
    num_computed: int = 0  # tokens whose keys and values are in the cache
    num_scheduled: int = 0  # those, and the tokens of steps under way
    num_pending: int = 0  # tokens that steps under way will sample
    steps_under_way: int = 0  # launched and not collected; its blocks must not be reused before they are
    block_tables: tuple[list[int], ...] = field(default_factory=lambda: ([],))  # of each KV group: blocks in order
    block_keys: list[bytes] = field(default_factory=list)  # of its leading full blocks, as far as somebody asked
    num_published: int = 0  # blocks that are computed and findable
    saved: "SavedBlocks | None" = None  # in the host pool, while it waits
    is_arriving: bool = False  # its blocks are being copied from there, or read from files
    files: "dict[tuple[int, int], Mapping[BlockKey, DiskBlock]]" = field(default_factory=dict, repr=False)
    cache: TokenSources = NONE  # of its prompt, when it was first admitted
    num_preemptions: int = 0
    arrival: float = 0.0  # when it was added, in seconds of some clock
    seated: float | None = None  # when it first had a seat, by the same clock
    followers: "list[Request]" = field(default_factory=list)  # wait for its prompt, which is theirs too
    is_leading: bool = False  # some of them pick their first token in a step under way, and then take over its blocks
    num_reported: int = 0  # positions of the prompt whose prediction of the next token is told, or under way
    status: RequestStatus = RequestStatus.WAITING
    constraint: "Constraint | None" = field(default=None, repr=False)  # how far its reply is in its grammar
    search: "Search | None" = field(default=None, repr=False)  # that it is a beam of, or a result, which never runs
    beam: "Beam | None" = field(default=None, repr=False)  # of the search: what it stands for
    _known_ids: "array[int]" = field(default_factory=lambda: array("q"))  # as far as somebody asked

    @property
    def num_cached(self) -> int:
        """Tokens of the prompt that were found computed when it first joined."""
        return self.cache.cached

    @property
    def queue_seconds(self) -> float:
        """That it waited before it first had a seat."""
        return 0.0 if self.seated is None else self.seated - self.arrival

    @property
    def runs_ahead(self) -> bool:
        """Whether its next step can be launched while its last token is still being sampled."""
        # Which token of a beam goes on is known when its whole search has got so far; which may follow in a grammar,
        # and which are penalized, when the one before is known.
        return self.beam is None and self.constraint is None and not self.params.needs_reply

    @property
    def block_table(self) -> list[int]:
        """Of the first KV group."""
        return self.block_tables[0]

    @property
    def num_tokens(self) -> int:
        """Tokens that are known: prompt and output."""
        return len(self.prompt_ids) + len(self.output_ids)

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Tokens start..stop of prompt and output together, without joining the two."""
        prompt = len(self.prompt_ids)
        return [*self.prompt_ids[start:stop], *self.output_ids[max(0, start - prompt) : max(0, stop - prompt)]]

    def to_report(self, start: int, stop: int) -> range:
        """The positions from start to stop that predict a token of the prompt, and were not reported before."""
        if self.params.prompt_logprobs is None:
            return range(0)
        first = max(start, self.num_reported)
        return range(first, max(first, min(stop, len(self.prompt_ids) - 1)))

    def known_ids(self) -> "array[int]":
        """All tokens that are known, int64 side by side. Whoever reads it must let go before it is asked again."""
        self._known_ids.extend(self.token_ids(len(self._known_ids), self.num_tokens))
        return self._known_ids


@dataclass(slots=True)
class SavedBlocks:
    """What a request that yielded needs to go on where it was, in the host pool."""

    num_computed: int
    blocks: tuple[list[tuple[int, int]], ...]  # of each KV group: (place in the table, block of the host pool)
    is_there: bool = False  # it has been copied
    is_lost: bool = False  # it could not be copied


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
    feeds: bool = False  # its last token is still being sampled by the step before: the runner takes it from there
    reported: range = range(0)  # positions whose prediction of the prompt's next token is to be told
    copies: tuple[BlockCopy, ...] = ()
    followers: tuple[Request, ...] = ()  # pick a first token of their own from the same logits

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens

    @property
    def picking(self) -> "tuple[Request, ...]":
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
class TokenLogprobs:
    """Natural-log probabilities by the model alone, before penalties, temperature and filters; or after all of them, if
    the request has `drawn_logprobs`."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, logprob), most likely first


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
