"""Reports beside the text of completions: the fields of vLLM and llama.cpp that ask for them, and the reports.

Chunks of both kinds of completions carry token ids, usage, and timings.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, TypeAlias

from msgspec import Meta

from app.generation.events import ChatEvent, GeneratedTokens, TokenCounts
from app.generation.options import GenerationOptions, ReplyOptions, TimeLimits
from app.server.common_fields import Alternatives, Milliseconds
from app.server.dialects.openai.chat import ChatCompletionChunk
from app.server.dialects.openai.completions import Completion
from app.server.dialects.openai.requests import GenerationRequest
from app.server.dialects.openai.tokens import usage_of, usage_so_far
from app.server.usage import RunningCounts, timings_of
from engine.sampling_params import SamplingParams

RequestId: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:-]{1,128}$")]


class ReportingRequest(GenerationRequest, kw_only=True):
    """The fields of both kinds that the Responses API does not have."""

    prompt_logprobs: Alternatives | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # in log-probabilities
    timings_per_token: bool | None = None  # each chunk of a stream has timings
    request_id: RequestId | None = None  # the end of the reply's id
    t_max_prompt_ms: Milliseconds | None = None  # 0: any number, as for the next
    t_max_predict_ms: Milliseconds | None = None

    @property
    def reports_usage_continuously(self) -> bool:
        """Each chunk of a stream reports the usage so far."""
        options = self.stream_options
        return bool(self.reports_usage and self.stream and options and options.continuous_usage_stats)

    def _wanted(self, count: int, candidates: Sequence[SamplingParams], *, reports: bool) -> GenerationOptions:
        wanted = super()._wanted(count, candidates, reports=reports)
        return replace(wanted, limits=TimeLimits.of_milliseconds(self.t_max_prompt_ms, self.t_max_predict_ms))

    def _options(self) -> ReplyOptions:
        counts = self.reports_usage_continuously or bool(self.timings_per_token)
        return replace(
            super()._options(),
            reports_tokens=bool(self.return_token_ids) or counts,
            reports_progress=bool(self.return_progress or self.timings_per_token),
        )

    def _prompt_logprobs(self) -> int | None:
        return self.prompt_logprobs

    def _problems(self) -> Iterator[tuple[str, str]]:
        yield from super()._problems()
        if self.stream and self.prompt_logprobs is not None:
            yield "prompt_logprobs", "a stream does not report them; leave stream out."


class ChunkReports:
    """Collects what one request reports, and adds it to the request's chunks."""

    def __init__(self, wanted: ReportingRequest, counts: TokenCounts) -> None:
        """`counts` is added up elsewhere, while the replies end."""
        self._wanted = wanted
        self._counts = counts
        self._running = RunningCounts()
        self._ids: dict[int, list[int]] = {}  # of each choice, those that no chunk has reported

    def see(self, index: int, event: ChatEvent) -> None:
        """Count an event of the choice at `index`."""
        self._running.add(event)
        if isinstance(event, GeneratedTokens) and self._wanted.return_token_ids:
            self._ids.setdefault(index, []).extend(event.ids)

    def add(self, chunk: ChatCompletionChunk | Completion) -> None:
        """Add the reports that the request asks for to a chunk with choices."""
        if self._wanted.return_token_ids:
            for choice in chunk.choices:
                choice.token_ids = self._ids.pop(choice.index, [])
        if self._wanted.reports_usage_continuously:
            chunk.usage = usage_so_far(self._counts, self._running)
        if self._wanted.timings_per_token:
            chunk.timings = self._running.timings()

    def end(self, chunk: ChatCompletionChunk | Completion) -> None:
        """Add the usage and the timings of all replies to the last chunk, after they have ended."""
        chunk.usage, chunk.timings = usage_of(self._counts), timings_of(self._counts)
