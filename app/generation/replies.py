"""The replies to one request while the engine generates them, and the choices among them that the caller gets."""

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
    """Submits a request and folds the token events of its replies into batches of events."""

    def __init__(self, context: ReplyContext, stream: TokenStream, cache: CacheTracker) -> None:
        self._context = context
        self._stream = stream
        self._cache = cache
        self._replies: dict[int, Reply] = {}  # by the id of the engine's request

    def submit(self, prepared: PreparedRequest, origin: Origin) -> None:
        """Have the engine generate all of them, or none if this raises. The engine computes a prompt once that several
        candidates continue. A beam search has as many replies as it has results."""
        end_ids = self._context.tokenizer.end_of_generation_ids
        for prompt_ids, several in _group_by_prompt(prepared.submissions()):
            requests = self._stream.submit_several(prompt_ids, several, end_ids, origin)
            prompt = self._cache.track(requests[0])
            for request in requests:
                parser = None if prepared.new_parser is None else prepared.new_parser()
                self._replies[request.id] = Reply(len(self._replies), request, prompt, self._context, parser)

    def events(self, tokens: Sequence[TokenEvent]) -> Batch:
        """The events of further tokens; with a pause between batches, consecutive texts as one."""
        batch: Batch = []
        for token in tokens:
            reply = self._replies[token.request_id]
            batch += [(reply.index, event) for event in reply.events(token)]
            if reply.ended:
                self._stream.abort(token.request_id, FinishReason.STOP)  # a stop string ends the text, not the request
        return merge_deltas(batch) if self._context.options.pause else batch

    def close(self) -> None:
        """End all of them."""
        for reply in self._replies.values():
            reply.end()


def _group_by_prompt(
    submissions: Sequence[tuple[tuple[int, ...], SamplingParams]],
) -> list[tuple[tuple[int, ...], list[SamplingParams]]]:
    """Each run of equal prompts as one. A prompt is read again for each that reports on it, or searches."""
    groups: list[tuple[tuple[int, ...], list[SamplingParams]]] = []
    for prompt_ids, params in submissions:
        alone = params.prompt_logprobs is not None or params.beams is not None
        if groups and groups[-1][0] == prompt_ids and not alone:
            groups[-1][1].append(params)
        else:
            groups.append((prompt_ids, [params]))
    return groups


class Choices:
    """The replies that the caller of a request gets: all candidates as they come, or the best when all have ended."""

    def __init__(self, prepared: PreparedRequest, counts: TokenCounts, log: PrefillLog) -> None:
        """`counts` and `log` get every event of every candidate."""
        self._options = prepared.options
        self._grammar_field = prepared.grammar_field
        self._counts = counts
        self._log = log
        options = prepared.options
        self._ranking = _Ranking(options) if options.replies > options.count else None

    def select(self, batch: Batch) -> tuple[Batch, AppError | None]:
        """The events of `batch` for the caller, and the error that the caller gets after them if a reply failed."""
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
        """The events of the best candidates of each prompt, after all have ended; nothing if all were returned."""
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
                return ReplyAborted("Somebody ended it, or the engine is being stopped", "Try again.")
        return None


class _Ranking:
    """All candidates of a request, of which the best are returned: those with the highest mean log-probability."""

    def __init__(self, options: GenerationOptions) -> None:
        self._options = options
        self._candidates: dict[int, _Candidate] = {}

    def add(self, batch: Batch) -> None:
        for index, event in batch:
            self._candidates.setdefault(index, _Candidate()).add(event)

    def best(self) -> Batch:
        """The events of the best of each prompt."""
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
    logprob: float = 0.0  # of all tokens together

    @property
    def mean_logprob(self) -> float:
        return self.logprob / max(1, self.tokens)

    def add(self, event: ChatEvent) -> None:
        self.events.append(event)
        if isinstance(event, _Reporting):
            self.tokens += len(event.logprobs)
            self.logprob += sum(token.logprob for token in event.logprobs)


def _without_text(batch: Batch) -> Iterator[tuple[int, ChatEvent]]:
    """The events about prompts, and ends of replies without tokens."""
    for index, event in batch:
        if isinstance(event, ReplyEnd):
            yield index, replace(event, completion_tokens=0, reasoning_tokens=0)
        elif isinstance(event, PromptProgress | PromptLogprobs):
            yield index, event
