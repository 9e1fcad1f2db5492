"""Replies of llama.cpp's server: the chunks of a streamed reply, written from the events of the service.

`fold` makes a whole reply from the same chunks, so the two cannot disagree.
"""

import math
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from app.generation.cache_report import CacheReport
from app.generation.events import Batch, ChatEvent, GeneratedTokens, PromptProgress, ReplyEnd, TextDelta, TokenCounts
from app.generation.service import ChatService
from app.server.dialects.llama_cpp.settings import GenerationSettings
from app.server.dialects.llama_cpp.tokens import decode_ids
from app.server.http.endpoint import BARE_EVENTS, Framing
from app.server.http.errors import convert_errors
from app.server.usage import ProgressReport, Timings, finite_logprob, timings_of, token_text
from app.text.tokenizer import Tokenizer
from engine.request import FinishReason, TokenLogprobs, TokenSources

StopType = Literal["eos", "limit", "word"]


class Alternative(Struct, kw_only=True):
    """A token with its log-probability before sampling, or its probability after sampling."""

    id: int
    token: str
    bytes: list[int]
    logprob: float | UnsetType = UNSET
    prob: float | UnsetType = UNSET


class Probability(Alternative, kw_only=True):
    top_logprobs: list[Alternative] | UnsetType = UNSET
    top_probs: list[Alternative] | UnsetType = UNSET


class Completion(Struct, kw_only=True):
    """A chunk or a whole reply. Some fields are set only in the last chunk and in a whole reply."""

    index: int = 0  # index of the reply, if there are several
    content: str = ""
    tokens: list[int] = []  # token ids of the chunk; in a whole reply only if the request asks for them
    id_slot: int = -1
    stop: bool = False
    model: str | UnsetType = UNSET
    tokens_predicted: int  # tokens of the reply so far
    tokens_evaluated: int  # tokens of the prompt, cached or computed
    tokens_cached: int | UnsetType = UNSET  # cached tokens of the prompt
    generation_settings: GenerationSettings | UnsetType = UNSET
    prompt: str | UnsetType = UNSET  # the rendered prompt
    has_new_line: bool | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET
    stop_type: StopType | UnsetType = UNSET
    stopping_word: str | UnsetType = UNSET
    completion_probabilities: list[Probability] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    prompt_progress: ProgressReport | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """Data and options for the chunks of a request."""

    model: str
    prompts: Sequence[tuple[int, ...]]
    settings: Sequence[GenerationSettings]  # settings of each reply to a prompt
    truncated: bool  # whether a part of the prompt was left out
    progress: bool  # report the progress of prefill
    timings: bool  # report timings in every chunk


@dataclass(slots=True)
class _ReplyState:
    """State of one reply."""

    tokens: list[int] = field(default_factory=list)  # ids that no chunk has reported yet
    predicted: int = 0
    first_token_at: float = 0.0
    has_line_break: bool = False
    prompt_progress: PromptProgress | None = None


class ChunkWriter:
    """Writes the chunks of one request."""

    def __init__(self, service: ChatService, reports: ReportOptions) -> None:
        self._service = service
        self._reports = reports
        self._started_at = time.monotonic()
        self._replies: dict[int, _ReplyState] = {}
        self._prompt_texts: dict[int, str] = {}  # keyed by the index of the prompt

    async def chunks(self, replies: AsyncGenerator[Batch]) -> AsyncGenerator[list[Completion]]:
        """Yield the chunks in batches. Errors about the prompts name their field."""
        with convert_errors("prompt"):
            async with aclosing(replies) as batches:
                async for batch in batches:
                    if chunks := [chunk for index, event in batch for chunk in self._write(index, event)]:
                        await self._add_prompts(chunks)
                        yield chunks

    async def _add_prompts(self, chunks: Sequence[Completion]) -> None:
        """Add the text of the prompt to the last chunk of each reply."""
        for chunk in chunks:
            if chunk.stop:
                chunk.prompt = await self._prompt_text(chunk.index)

    def _write(self, index: int, event: ChatEvent) -> Iterator[Completion]:
        reply = self._replies.setdefault(index, _ReplyState())
        match event:
            case GeneratedTokens(ids):
                reply.first_token_at = reply.first_token_at or time.monotonic()
                reply.tokens += ids
                reply.predicted += len(ids)
            case PromptProgress():
                reply.prompt_progress = event
                if self._reports.progress:
                    chunk = self._chunk(index, reply)
                    chunk.prompt_progress = ProgressReport.of(event)
                    yield chunk
            case TextDelta(text, logprobs):
                reply.has_line_break = reply.has_line_break or "\n" in text
                chunk = self._chunk(index, reply, text)
                chunk.completion_probabilities = self._probabilities(logprobs) or UNSET
                if self._reports.timings and reply.prompt_progress is not None:
                    chunk.timings = self._timings_so_far(reply, reply.prompt_progress)
                yield chunk
            case ReplyEnd():
                yield self._end(index, reply, event)

    def _chunk(self, index: int, reply: _ReplyState, text: str = "") -> Completion:
        """Return a chunk with the token ids that were not reported yet."""
        tokens, reply.tokens = reply.tokens, []
        evaluated = len(self._prompt(index))
        return Completion(
            index=index, content=text, tokens=tokens, tokens_predicted=reply.predicted, tokens_evaluated=evaluated
        )

    def _end(self, index: int, reply: _ReplyState, end: ReplyEnd) -> Completion:
        counts = TokenCounts()
        counts.add(end, first_of_prompt=True)
        chunk = self._chunk(index, reply)
        chunk.stop = True
        chunk.model = self._reports.model
        chunk.tokens_predicted = end.completion_tokens
        chunk.tokens_cached = end.cached_tokens
        chunk.generation_settings = self._reports.settings[index % len(self._reports.settings)]
        chunk.has_new_line = reply.has_line_break
        chunk.truncated = self._reports.truncated
        is_cut = end.finish is FinishReason.LENGTH
        chunk.stop_type = "word" if end.stop is not None else "limit" if is_cut else "eos"
        chunk.stopping_word = end.stop or ""
        chunk.timings = timings_of(counts)
        return chunk

    def _prompt(self, index: int) -> tuple[int, ...]:
        return self._reports.prompts[index // len(self._reports.settings)]

    async def _prompt_text(self, index: int) -> str:
        """Return the text of the prompt's tokens. It is decoded once for all replies to the prompt."""
        prompt = index // len(self._reports.settings)
        if prompt not in self._prompt_texts:
            self._prompt_texts[prompt] = await decode_ids(self._service, self._reports.prompts[prompt])
        return self._prompt_texts[prompt]

    def _probabilities(self, reported: Sequence[TokenLogprobs]) -> list[Probability]:
        drawn = self._reports.settings[0].post_sampling_probs
        return [_probability(self._service.tokenizer, one, drawn=drawn) for one in reported]

    def _timings_so_far(self, reply: _ReplyState, prompt_progress: PromptProgress) -> Timings:
        first = reply.first_token_at - self._started_at
        counts = TokenCounts(
            cache=CacheReport(
                TokenSources(device=prompt_progress.cached, computed=prompt_progress.total - prompt_progress.cached)
            ),
            completion=reply.predicted,
            replies=1,
            first_token_seconds=first,
            total_seconds=time.monotonic() - self._started_at,
            queue_seconds=max(0.0, first - prompt_progress.seconds),
            prefill_seconds=prompt_progress.seconds,
        )
        return timings_of(counts)


def fold(*, reports_tokens: bool, fields: Sequence[str] = ()) -> Callable[[AsyncGenerator[Completion]], Any]:
    """Return a function that folds chunks into the whole reply: one completion, or a list of several.

    With `reports_tokens`, the reply has its token ids. With `fields`, it has only those (see `select_fields`).
    """

    async def folded(chunks: AsyncGenerator[Completion]) -> Any:
        parts: dict[int, list[Completion]] = {}
        async for chunk in chunks:
            parts.setdefault(chunk.index, []).append(chunk)
        wholes = [_merge(parts[index], reports_tokens=reports_tokens) for index in sorted(parts)]
        replies = [select_fields(whole, fields) if fields else whole for whole in wholes]
        return replies[0] if len(replies) == 1 else replies

    return folded


def _merge(parts: Sequence[Completion], *, reports_tokens: bool) -> Completion:
    whole = parts[-1]
    whole.content = "".join(part.content for part in parts)
    whole.tokens = [token_id for part in parts for token_id in part.tokens] if reports_tokens else []
    whole.completion_probabilities = [it for part in parts for it in part.completion_probabilities or ()] or UNSET
    return whole


def select_fields(whole: Completion, fields: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a completion at some paths, such as `generation_settings/n_predict`, keyed by path.

    Paths that do not exist are left out.
    """
    fields_of: Any = msgspec.to_builtins(whole)
    found = {}
    for path in fields:
        value = fields_of
        for step in path.split("/"):
            value = value.get(step, UNSET) if isinstance(value, dict) else UNSET
        if value is not UNSET:
            found[path] = value
    return found


def framing(fields: Sequence[str]) -> Framing:
    """Return the framing of a stream. If `fields` are given, its last chunk has only those."""

    def frame(chunk: Struct) -> bytes:
        reply = select_fields(chunk, fields) if isinstance(chunk, Completion) and chunk.stop else chunk
        return BARE_EVENTS.frame(reply)

    return replace(BARE_EVENTS, frame=frame) if fields else BARE_EVENTS


def _probability(tokenizer: Tokenizer, token: TokenLogprobs, *, drawn: bool) -> Probability:
    top = [Alternative(**_alternative_fields(tokenizer, *one, drawn=drawn)) for one in token.top]
    picked = Probability(**_alternative_fields(tokenizer, token.token_id, token.logprob, drawn=drawn))
    if drawn:
        picked.top_probs = top
    else:
        picked.top_logprobs = top
    return picked


def _alternative_fields(tokenizer: Tokenizer, token_id: int, logprob: float, *, drawn: bool) -> dict[str, Any]:
    encoded = list(tokenizer.token_bytes(token_id, show_control=True))
    likely = {"prob": math.exp(logprob)} if drawn else {"logprob": finite_logprob(logprob)}
    return {"id": token_id, "token": token_text(tokenizer, token_id), "bytes": encoded, **likely}
