"""Events of replies, and the token counts of a request."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from app.generation.cache_report import EMPTY_REPORT, CacheReport
from engine.draft import NO_DRAFTS, DraftCounts

if TYPE_CHECKING:  # not imported at run time: the chat imports this module before its screens appear
    from engine.request import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """Progress of a prefill in tokens. Sent while a long prompt is prefilled."""

    done: int
    total: int
    cached: int = 0  # tokens found in the KV cache, included in `done`
    seconds: float = 0.0  # seconds since the prefill started, without the time in the queue


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of further prompt tokens, from the second one on, if requested. All come before the reply."""

    logprobs: "tuple[TokenLogprobs, ...]"


@dataclass(frozen=True, slots=True)
class GeneratedTokens:
    """Ids of further tokens of the reply, including hidden ones and markup, if requested."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Further text of the reply. It never ends within a character or contains a part of a stop string."""

    text: str
    logprobs: "tuple[TokenLogprobs, ...]" = ()  # log-probabilities of the tokens since the last delta, if requested


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Further reasoning of the model, before its answer."""

    text: str
    logprobs: "tuple[TokenLogprobs, ...]" = ()


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The model calls a tool. The arguments follow, then a ToolCallEnd."""

    index: int  # index of the call within the reply, from 0
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """Further arguments of a call. Together they are the text of one JSON object."""

    index: int
    arguments: str
    logprobs: "tuple[TokenLogprobs, ...]" = ()


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The arguments of a call are complete. A call that was cut off has no such event."""

    index: int


@dataclass(frozen=True, slots=True)
class ReplyEnd:
    """The last event of a reply."""

    finish: "FinishReason"
    stop: str | None  # the stop string that ended the reply
    seed: int
    prompt_tokens: int
    cache: CacheReport  # where the prompt's tokens came from
    completion_tokens: int
    first_token_seconds: float  # seconds since the request was submitted
    total_seconds: float
    reasoning_tokens: int = 0  # number of completion tokens that are reasoning
    queue_seconds: float = 0.0  # time in the queue, part of the time to the first token
    drafts: DraftCounts = NO_DRAFTS
    error: str = ""  # error message if the finish reason is ERROR or GRAMMAR

    @property
    def cached_tokens(self) -> int:
        """Number of prompt tokens that were found in the KV cache."""
        return self.cache.sources.cached


# events that carry the content of a reply
ContentEvent = TextDelta | ReasoningDelta | ToolCallStart | ToolCallDelta | ToolCallEnd
ChatEvent = PromptProgress | PromptLogprobs | GeneratedTokens | ContentEvent | ReplyEnd
Batch = list[tuple[int, ChatEvent]]  # events that arrived together, each with the index of its reply


def merge_deltas(batch: Iterable[tuple[int, ChatEvent]]) -> Batch:
    """Merge consecutive text deltas of the same reply, and likewise reasoning deltas.

    Generated tokens between two deltas precede the merged delta.
    """
    result: Batch = []
    for index, event in batch:
        _add_merged(result, index, event)
    return result


def _add_merged(batch: Batch, index: int, event: ChatEvent) -> None:
    """Add an event to a merged batch."""
    recent = [one for _, one in takewhile(lambda entry: entry[0] == index, batch[:-3:-1])]  # newest first
    if recent and (both := _merged(recent[0], event)) is not None:
        batch[-1] = index, both
    elif (
        len(recent) == 2 and isinstance(recent[0], GeneratedTokens) and (both := _merged(recent[1], event)) is not None
    ):
        del batch[-2:]
        _add_merged(batch, index, recent[0])
        batch.append((index, both))
    else:
        batch.append((index, event))


def _merged(one: ChatEvent, other: ChatEvent) -> ChatEvent | None:
    """Return two events of one kind as a single event, or None if they cannot be merged."""
    match one, other:
        case TextDelta(), TextDelta():
            return TextDelta(one.text + other.text, one.logprobs + other.logprobs)
        case ReasoningDelta(), ReasoningDelta():
            return ReasoningDelta(one.text + other.text, one.logprobs + other.logprobs)
        case GeneratedTokens(), GeneratedTokens():
            return GeneratedTokens(one.ids + other.ids)
    return None


QUEUED = "queued"


@dataclass(slots=True)
class TokenCounts:
    """Token counts and times of a request, over all generated replies. A beam search counts only its results.

    A prompt that several replies continue counts once.
    """

    prompts: Sequence[tuple[int, ...]] = ()  # the ids of all prompts, set before their prefill
    prompt_total: int = 0  # number of tokens of all prompts, also set before their prefill
    prompt: int = 0  # number of tokens of the prompts whose replies have ended
    cache: CacheReport = EMPTY_REPORT  # sources of the prompts' tokens, as the first reply of each prompt reported them
    completion: int = 0
    replies: int = 0  # number of replies that have ended
    first_token_seconds: float = math.inf  # seconds to the first token, minimum over the replies
    total_seconds: float = 0.0  # seconds to the end of the reply, maximum over the replies
    queue_seconds: float = 0.0  # maximum time that a prompt waited in the queue
    prefill_seconds: float = 0.0  # maximum time from the queue to the first token, without the time to restore blocks
    reasoning: int = 0  # number of completion tokens that are reasoning
    drafts: DraftCounts = NO_DRAFTS
    status: str = QUEUED  # state of the request, shown to a client that waits

    def set_prompts(self, prompts: Sequence[tuple[int, ...]]) -> None:
        """Record the prompts of the request, before their prefill."""
        self.prompts, self.prompt_total = prompts, sum(map(len, prompts))

    def update_status(self, event: ChatEvent) -> None:
        """Set the status from an event of the request."""
        if isinstance(event, PromptProgress):
            self.status = f"prefill {event.done:,} of {event.total:,}"
        else:
            self.status = "decode"

    def add(self, end: ReplyEnd, *, first_of_prompt: bool) -> None:
        """Add the counts and times of a reply that has ended."""
        self.completion += end.completion_tokens
        self.reasoning += end.reasoning_tokens
        self.drafts += end.drafts
        self.replies += 1
        self.first_token_seconds = min(self.first_token_seconds, end.first_token_seconds)
        self.total_seconds = max(self.total_seconds, end.total_seconds)
        if first_of_prompt:
            self.prompt += end.prompt_tokens
            self.cache = self.cache.plus(end.cache)
            self.queue_seconds = max(self.queue_seconds, end.queue_seconds)
            prefill = end.first_token_seconds - end.queue_seconds - end.cache.sources.restore_seconds
            self.prefill_seconds = max(self.prefill_seconds, prefill)
