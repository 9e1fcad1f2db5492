"""The choices of one request: several replies at once, and what they used together.

Nothing here knows a wire format.
"""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from app.generation.events import (
    NO_LIMITS,
    PLAIN_REPLY,
    ChatEvent,
    PromptLogprobs,
    PromptProgress,
    ReasoningDelta,
    ReplyEnd,
    ReplyOptions,
    TextDelta,
    TimeLimits,
    ToolCallDelta,
)
from app.generation.reply_formats.reply_parser import ReplyParser
from app.generation.service import ChatService
from app.generation.token_filter import TokenFilter
from app.server.errors import InvalidRequest, ReplyAborted, ReplyFailed
from app.server.http.request_log import logged
from app.server.usage import TokenCounts
from engine.errors import PromptTooLong
from engine.grammar import Grammar
from engine.request import FinishReason, Origin
from engine.sampling_params import SamplingParams

_Reporting = TextDelta | ReasoningDelta | ToolCallDelta
Batch = list[tuple[int, ChatEvent]]


def candidates(given: Mapping[str, Any], count: int, seed: int | None) -> list[SamplingParams]:
    """Return the parameters of `count` replies to a prompt; with a seed, each has the next one. Raises
    InvalidSampling."""
    seeds: list[dict[str, Any]] = [{} if seed is None else {"seed": (seed + number) % 2**64} for number in range(count)]
    return [SamplingParams(**given, **one) for one in seeds]


@dataclass(frozen=True, slots=True)
class WantedChoices:
    """What is wanted of each prompt of a request."""

    count: int  # that are told
    candidates: Sequence[SamplingParams]  # that are generated; or the one of a beam search, which has `count` results
    reports: bool  # their log-probabilities
    context: int | None = None  # most tokens of a prompt and its reply together; None: what the model has
    limits: TimeLimits = NO_LIMITS
    pause: float = 0.0  # seconds that pass between two batches, at least
    options: ReplyOptions = PLAIN_REPLY
    filter: TokenFilter | None = None  # of the tokens of each reply
    grammar_parameter: str = ""  # the field that asks for the grammar
    is_told: bool = True  # False: the prompts are read, so that they are found computed later, and no more

    @property
    def replies(self) -> int:
        """That the engine generates, and tells."""
        beams = self.candidates[0].beams
        return len(self.candidates) if beams is None else beams.results

    def keeping_to(self, grammar: Grammar | None, parameter: str = "grammar") -> "WantedChoices":
        """The same, with the grammar that each reply follows, within the filter, and the field that asks for it. Raises
        InvalidSampling."""
        if self.filter is not None:
            grammar = replace(self.filter, reply=grammar)
        candidates = [replace(one, grammar=grammar) for one in self.candidates]
        return replace(self, candidates=candidates, grammar_parameter=parameter)

    def behind(self, prompt: Sequence[int]) -> Sequence[SamplingParams]:
        """The candidates that continue a prompt, within the context. Raises PromptTooLong."""
        if self.context is None:
            return self.candidates
        room = self.context - len(prompt)
        if room < 1:
            raise PromptTooLong(
                f"The prompt has {len(prompt):,} tokens, and num_ctx allows {self.context:,} including the reply",
                "Shorten the prompt, or raise num_ctx or leave it out: it is a cap, and nothing is loaded anew for it.",
                tokens=len(prompt),
                context=self.context,
            )
        return [replace(one, max_tokens=min(room, one.max_tokens or room)) for one in self.candidates]


async def generate_choices(
    service: ChatService,
    prompts: Sequence[tuple[int, ...]],
    wanted: WantedChoices,
    origin: Origin,
    counts: TokenCounts,
    *,
    continues_text: bool = False,
    new_parser: Callable[[], ReplyParser] | None = None,
) -> AsyncGenerator[Batch]:
    """Continue each prompt as is wanted, its replies read by parsers of their own; yields batches of (choice, event),
    choices in order of prompts, and adds to `counts`. Where the best of more candidates are wanted they come when all
    have ended, best first.

    Raises what `ChatService.generate` raises; ReplyFailed or ReplyAborted if the engine gave one up, and InvalidRequest
    if its grammar turned out too complex, after what came before. Closing the generator ends all of them.
    """
    asked = [(prompt, one) for prompt in prompts for one in wanted.behind(prompt)]
    ranking = _Ranking(wanted) if wanted.replies > wanted.count else None
    batches = service.generate_several(
        asked,
        origin=origin,
        continues_text=continues_text,
        new_parser=new_parser,
        limits=wanted.limits,
        pause=wanted.pause,
        options=wanted.options,
    )
    counts.prompts, counts.asked = prompts, sum(map(len, prompts))
    with logged(service.name, origin, counts) as log:
        async with aclosing(batches):
            async for batch in batches:
                for reply, event in batch:
                    counts.see(event)
                    log.see(reply, event)
                good, failure = _up_to_failure(batch if wanted.is_told else _untold(batch), wanted.grammar_parameter)
                for reply, event in good:
                    if isinstance(event, ReplyEnd):
                        counts.add(event, first_of_prompt=reply % wanted.replies == 0)
                if ranking is not None:
                    ranking.add(good)
                elif good:
                    yield good
                if failure is not None:
                    raise failure
    if ranking is not None:
        yield ranking.best()


class _Ranking:
    """All candidates of a request, of which the best are told: those with the highest mean log-probability."""

    def __init__(self, wanted: WantedChoices) -> None:
        self._wanted = wanted
        self._candidates: dict[int, _Candidate] = {}

    def add(self, batch: Batch) -> None:
        for reply, event in batch:
            self._candidates.setdefault(reply, _Candidate()).add(event)

    def best(self) -> Batch:
        """The events of the best of each prompt."""
        told: Batch = []
        replies, count = self._wanted.replies, self._wanted.count
        for prompt in range(len(self._candidates) // replies):
            several = [self._candidates[prompt * replies + number] for number in range(replies)]
            several.sort(key=lambda candidate: candidate.mean_logprob, reverse=True)
            for rank, candidate in enumerate(several[:count]):
                told += [(prompt * count + rank, self._report(event)) for event in candidate.events]
        return told

    def _report(self, event: ChatEvent) -> ChatEvent:
        if isinstance(event, _Reporting) and not self._wanted.reports:
            return replace(event, logprobs=())
        return event


@dataclass(slots=True)
class _Candidate:
    events: list[ChatEvent] = field(default_factory=list)
    tokens: int = 0
    logprob: float = 0.0  # of all tokens together

    @property
    def mean_logprob(self) -> float:
        return self.logprob / max(1, self.tokens)

    def add(self, event: ChatEvent) -> None:
        self.events.append(event)
        if isinstance(event, _Reporting):
            self.tokens += len(event.logprobs)
            self.logprob += sum(token.logprob for token in event.logprobs)


def _untold(batch: Batch) -> Batch:
    """Without the reply."""
    told: Batch = []
    for reply, event in batch:
        if isinstance(event, ReplyEnd):
            told.append((reply, replace(event, completion_tokens=0, thought_tokens=0)))
        elif isinstance(event, PromptProgress | PromptLogprobs):
            told.append((reply, event))
    return told


def _up_to_failure(
    batch: Batch, grammar_parameter: str
) -> tuple[Batch, ReplyFailed | ReplyAborted | InvalidRequest | None]:
    """What came before the engine gave a reply up, and that as an error; all of it, where it did not."""
    for position, (_, event) in enumerate(batch):
        if isinstance(event, ReplyEnd) and event.finish is FinishReason.GRAMMAR:
            problem = f"{grammar_parameter}: {event.error}"
            return batch[:position], InvalidRequest(problem, parameter=grammar_parameter)
        if isinstance(event, ReplyEnd) and event.finish is FinishReason.ERROR:
            return batch[:position], ReplyFailed(f"The engine failed: {event.error}", "Try again.")
        if isinstance(event, ReplyEnd) and event.finish is FinishReason.ABORT:
            return batch[:position], ReplyAborted("Somebody ended it, or the engine is being stopped", "Try again.")
    return batch, None
