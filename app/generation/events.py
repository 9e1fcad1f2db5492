"""The events of replies, and the tokens that they add up to."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.generation.cache_report import EMPTY_REPORT, CacheReport

if TYPE_CHECKING:  # the chat imports this before its screens appear
    from engine.request import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """How much of the prompt has been read, in tokens. Sent while a long prompt is read."""

    done: int
    total: int
    cached: int = 0  # of those that are done: what did not have to be read
    seconds: float = 0.0  # since it began, after the queue


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Of further tokens of the prompt, from its second on, where they were asked for. All come before the reply."""

    logprobs: "tuple[TokenLogprobs, ...]"


@dataclass(frozen=True, slots=True)
class GeneratedTokens:
    """The ids of further tokens of the reply, hidden ones and those of markup included, where they were asked for."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More text of the reply; never half a character, never a part of a stop string."""

    text: str
    logprobs: "tuple[TokenLogprobs, ...]" = ()  # of the tokens since the last delta, where they were asked for


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thinks before it answers."""

    text: str
    logprobs: "tuple[TokenLogprobs, ...]" = ()


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The model calls a tool. Its arguments follow, and then its end."""

    index: int  # of the calls of one reply, from 0
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of the arguments of a call; together, the text of one JSON object."""

    index: int
    arguments: str
    logprobs: "tuple[TokenLogprobs, ...]" = ()


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The arguments of a call are complete. A call that was cut off has none of this."""

    index: int


@dataclass(frozen=True, slots=True)
class ReplyEnd:
    """The last event of a reply."""

    finish: "FinishReason"
    stop: str | None  # the stop string that ended it
    seed: int
    prompt_tokens: int
    cache: CacheReport  # where the prompt's came from
    completion_tokens: int
    first_token_seconds: float  # from the question to the first token
    total_seconds: float
    reasoning_tokens: int = 0  # of the completion's
    queue_seconds: float = 0.0  # of the time to the first token, what passed before the engine began
    error: str = ""  # for FinishReason.ERROR

    @property
    def cached_tokens(self) -> int:
        """Of the prompt's, those that did not have to be computed."""
        return self.cache.sources.cached


ContentEvent = TextDelta | ReasoningDelta | ToolCallStart | ToolCallDelta | ToolCallEnd  # what tokens become
ChatEvent = PromptProgress | PromptLogprobs | GeneratedTokens | ContentEvent | ReplyEnd
Batch = list[tuple[int, ChatEvent]]  # events that came together, each with the index of its reply


def merge_deltas(batch: Iterable[tuple[int, ChatEvent]]) -> Batch:
    """The same events, with consecutive texts of one reply as one event."""
    result: Batch = []
    for index, event in batch:
        before = result[-1] if result else None
        if before is not None and before[0] == index and (both := _merged(before[1], event)) is not None:
            result[-1] = index, both
        else:
            result.append((index, event))
    return result


def _merged(one: ChatEvent, other: ChatEvent) -> ChatEvent | None:
    """Two texts of a kind as one; None for anything else."""
    match one, other:
        case TextDelta(), TextDelta():
            return TextDelta(one.text + other.text, one.logprobs + other.logprobs)
        case ReasoningDelta(), ReasoningDelta():
            return ReasoningDelta(one.text + other.text, one.logprobs + other.logprobs)
    return None


QUEUED = "queued"


@dataclass(slots=True)
class TokenCounts:
    """Tokens that a request used: of all that was generated for it, but what a beam search does not return. A prompt
    that several choices continue counts once."""

    prompts: Sequence[tuple[int, ...]] = ()  # the ids of all prompts, known before any is read
    prompt_total: int = 0  # tokens of all prompts, likewise
    prompt: int = 0  # of those whose replies have ended
    cache: CacheReport = EMPTY_REPORT  # of the prompts, as the first choice of each found them
    completion: int = 0
    replies: int = 0  # that have ended
    first_token_seconds: float = math.inf  # the least of any reply
    total_seconds: float = 0.0  # the most
    queue_seconds: float = 0.0  # the most that a prompt waited before the engine began with it
    prefill_seconds: float = 0.0  # the most from there to its first token, but for what was restored
    reasoning: int = 0  # of the completion
    status: str = QUEUED  # what the request is doing, for a client that waits

    def set_prompts(self, prompts: Sequence[tuple[int, ...]]) -> None:
        """Note the prompts, before the engine reads any of them."""
        self.prompts, self.prompt_total = prompts, sum(map(len, prompts))

    def update_status(self, event: ChatEvent) -> None:
        """Keep the status up to date."""
        if isinstance(event, PromptProgress):
            self.status = f"prefill {event.done:,} of {event.total:,}"
        else:
            self.status = "decode"

    def add(self, end: ReplyEnd, *, first_of_prompt: bool) -> None:
        """Count a reply that has ended."""
        self.completion += end.completion_tokens
        self.reasoning += end.reasoning_tokens
        self.replies += 1
        self.first_token_seconds = min(self.first_token_seconds, end.first_token_seconds)
        self.total_seconds = max(self.total_seconds, end.total_seconds)
        if first_of_prompt:
            self.prompt += end.prompt_tokens
            self.cache = self.cache.plus(end.cache)
            self.queue_seconds = max(self.queue_seconds, end.queue_seconds)
            prefill = end.first_token_seconds - end.queue_seconds - end.cache.sources.restore_seconds
            self.prefill_seconds = max(self.prefill_seconds, prefill)
