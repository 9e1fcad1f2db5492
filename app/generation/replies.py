"""The replies to one request while they are generated, and the choices that the caller gets."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from app.errors import AppError, InvalidGrammar, ReplyAborted, ReplyFailed
from app.generation.cache_tracker import CacheTracker
from app.generation.events import (
    Batch,
    ChatEvent,
    PromptLogprobs,
    PromptProgress,
    ReasoningDelta,
    ReplyEnd,
    TextDelta,
    TokenCounts,
    ToolCallDelta,
    merge_deltas,
)
from app.generation.options import GenerationOptions, PreparedRequest
from app.generation.reply import Reply, ReplyContext
from app.generation.request_log import PrefillLog
from app.generation.token_streams import TokenStream
from engine.request import FinishReason, Origin, TokenEvent
from engine.sampling_params import SamplingParams

_Reporting = TextDelta | ReasoningDelta | ToolCallDelta


class Replies:
    """Submits a request, and converts the token events of its replies to batches of events."""

    def __init__(self, context: ReplyContext, stream: TokenStream, cache: CacheTracker) -> None:
        self._context = context
        self._stream = stream
        self._cache = cache
        self._replies: dict[int, Reply] = {}  # replies by the id of the engine's request

    def submit(self, prepared: PreparedRequest, origin: Origin) -> None:
        """Submit all replies, or none if this raises.

        Several candidates for one prompt share its prefill. A beam search has one reply per result.
        """
        end_ids = self._context.tokenizer.end_of_generation_ids
        for prompt_ids, several in _group_by_prompt(prepared.submissions()):
            requests = self._stream.submit_several(prompt_ids, several, end_ids, origin, prepared.marks)
            prompt = self._cache.track(requests[0])
            for request in requests:
                parser = None if prepared.new_parser is None else prepared.new_parser()
                self._replies[request.id] = Reply(len(self._replies), request, prompt, self._context, parser)

    def events(self, tokens: Sequence[TokenEvent]) -> Batch:
        """Return the chat events for these token events. If the options set a pause between events,
        consecutive deltas are merged.
        """
        batch: Batch = []
        for token in tokens:
            reply = self._replies[token.request_id]
            batch += [(reply.index, event) for event in reply.events(token)]
            if reply.ended:
                # A stop string ends the text. The engine's request must be aborted.
                self._stream.abort(token.request_id, FinishReason.STOP)
        return merge_deltas(batch) if self._context.options.pause else batch

    def close(self) -> None:
        """End all replies that have not ended."""
        for reply in self._replies.values():
            reply.end()


def _group_by_prompt(
    submissions: Sequence[tuple[tuple[int, ...], SamplingParams]],
) -> list[tuple[tuple[int, ...], list[SamplingParams]]]:
    """Group consecutive equal prompts. A prompt with prompt logprobs or a beam search is prefilled separately."""
    groups: list[tuple[tuple[int, ...], list[SamplingParams]]] = []
    for prompt_ids, params in submissions:
        alone = params.prompt_logprobs is not None or params.beams is not None
        if groups and groups[-1][0] == prompt_ids and not alone:
            groups[-1][1].append(params)
        else:
            groups.append((prompt_ids, [params]))
    return groups


class Choices:
    """Selects what the caller gets: all candidates as they arrive, or the best ones after all have ended."""

    def __init__(self, prepared: PreparedRequest, counts: TokenCounts, log: PrefillLog) -> None:
        """`counts` and `log` receive every event of every candidate."""
        self._options = prepared.options
        self._grammar_field = prepared.grammar_field
        self._counts = counts
        self._log = log
        options = prepared.options
        self._ranking = _Ranking(options) if options.replies > options.count else None

    def select(self, batch: Batch) -> tuple[Batch, AppError | None]:
        """Return the events of `batch` for the caller, and the error to raise after them if a reply failed."""
        for index, event in batch:
            self._counts.update_status(event)
            self._log.log_progress(index, event)
        good, failure = self._up_to_failure(batch if self._options.returns_text else [*_without_text(batch)])
        for index, event in good:
            if isinstance(event, ReplyEnd):
                self._counts.add(event, first_of_prompt=index % self._options.replies == 0)
        if self._ranking is None:
            return good, failure
        self._ranking.add(good)
        return [], failure

    def best(self) -> Batch:
        """Return the events of the best candidates of each prompt after all have ended.

        Empty if `select` returns all candidates as they arrive.
        """
        return [] if self._ranking is None else self._ranking.best()

    def _up_to_failure(self, batch: Batch) -> tuple[Batch, AppError | None]:
        for position, (_, event) in enumerate(batch):
            if isinstance(event, ReplyEnd) and (failure := self._failure(event)) is not None:
                return batch[:position], failure
        return batch, None

    def _failure(self, end: ReplyEnd) -> AppError | None:
        match end.finish:
            case FinishReason.GRAMMAR:
                return InvalidGrammar(end.error, path=self._grammar_field)
            case FinishReason.ERROR:
                return ReplyFailed(f"The engine failed: {end.error}", "Try again.")
            case FinishReason.ABORT:
                return ReplyAborted("The server stopped this reply", "Try again.")
        return None


class _Ranking:
    """Collects all candidates of a request, to return those with the highest mean log-probability."""

    def __init__(self, options: GenerationOptions) -> None:
        self._options = options
        self._candidates: dict[int, _Candidate] = {}

    def add(self, batch: Batch) -> None:
        for index, event in batch:
            self._candidates.setdefault(index, _Candidate()).add(event)

    def best(self) -> Batch:
        """Return the events of the best candidates of each prompt, best first."""
        best: Batch = []
        replies, count = self._options.replies, self._options.count
        for prompt in range(len(self._candidates) // replies):
            several = [self._candidates[prompt * replies + number] for number in range(replies)]
            several.sort(key=lambda candidate: candidate.mean_logprob, reverse=True)
            for rank, candidate in enumerate(several[:count]):
                best += [(prompt * count + rank, self._reported(event)) for event in candidate.events]
        return best

    def _reported(self, event: ChatEvent) -> ChatEvent:
        if isinstance(event, _Reporting) and not self._options.reports_logprobs:
            return replace(event, logprobs=())
        return event


@dataclass(slots=True)
class _Candidate:
    events: list[ChatEvent] = field(default_factory=list)
    tokens: int = 0
    logprob: float = 0.0  # sum of the log-probabilities of the tokens

    @property
    def mean_logprob(self) -> float:
        return self.logprob / max(1, self.tokens)

    def add(self, event: ChatEvent) -> None:
        self.events.append(event)
        if isinstance(event, _Reporting):
            self.tokens += len(event.logprobs)
            self.logprob += sum(token.logprob for token in event.logprobs)


def _without_text(batch: Batch) -> Iterator[tuple[int, ChatEvent]]:
    """Yield only the events about prompts, and the ends of replies with zero completion tokens."""
    for index, event in batch:
        if isinstance(event, ReplyEnd):
            yield index, replace(event, completion_tokens=0, reasoning_tokens=0)
        elif isinstance(event, PromptProgress | PromptLogprobs):
            yield index, event
