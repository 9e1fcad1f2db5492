"""Replies of llama.cpp's server: one writer of chunks, which are the streamed reply, and a fold that makes the whole
reply of the same chunks. So the two cannot disagree.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from app.chat.events import ChatEvent, ReplyEnd, TextDelta
from app.chat.service import ChatService
from app.server.choices import Batch
from app.server.token_counts import TokenCounts
from app.server.token_reports import Timings, finite, timings_of, token_text
from app.text.tokenizer import Tokenizer
from engine.request import FinishReason, SamplingParams, TokenLogprobs

StopType = Literal["eos", "limit", "word"]


class Alternative(Struct):
    id: int
    token: str
    bytes: list[int]
    logprob: float


class Probability(Struct):
    id: int
    token: str
    bytes: list[int]
    logprob: float
    top_logprobs: list[Alternative]


class GenerationSettings(Struct):
    """As they were understood."""

    n_ctx: int
    n_predict: int
    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    stop: list[str]

    @classmethod
    def of(cls, params: SamplingParams, context_length: int) -> "GenerationSettings":
        return cls(
            n_ctx=context_length,
            n_predict=-1 if params.max_tokens is None else params.max_tokens,
            seed=params.seed,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            repeat_penalty=params.repetition_penalty,
            stop=list(params.stop),
        )


class Completion(Struct, kw_only=True):
    """Of a chunk: its part. Of the last chunk, and of a whole reply, with all that is known at the end."""

    index: int = 0
    content: str = ""
    id_slot: int = -1
    stop: bool = False
    model: str | UnsetType = UNSET
    tokens_predicted: int | UnsetType = UNSET
    tokens_evaluated: int | UnsetType = UNSET  # all of the prompt, found or computed
    tokens_cached: int | UnsetType = UNSET  # of those, found
    generation_settings: GenerationSettings | UnsetType = UNSET
    has_new_line: bool | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET
    stop_type: StopType | UnsetType = UNSET
    stopping_word: str | UnsetType = UNSET
    completion_probabilities: list[Probability] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


class Writer:
    """Writes the chunks of one reply."""

    def __init__(self, service: ChatService, params: SamplingParams, *, truncated: bool) -> None:
        """`truncated` where something was left out of the prompt."""
        self._model = service.name
        self._context_length = service.context_length
        self._tokenizer = service.tokenizer
        self._params = params
        self._truncated = truncated
        self._has_line_break = False

    async def chunks(self, events: AsyncGenerator[Batch], counts: TokenCounts) -> AsyncGenerator[list[Completion]]:
        """The reply, in batches as it comes."""
        async with aclosing(events) as batches:
            async for batch in batches:
                written = [self._write(event, counts) for _, event in batch]
                if chunks := [chunk for chunk in written if chunk is not None]:
                    yield chunks

    def _write(self, event: ChatEvent, counts: TokenCounts) -> Completion | None:
        match event:
            case TextDelta(text, logprobs):
                self._has_line_break = self._has_line_break or "\n" in text
                told = [_probability(self._tokenizer, one) for one in logprobs]
                return Completion(content=text, completion_probabilities=told or UNSET)
            case ReplyEnd():
                return self._end(event, counts)
        return None

    def _end(self, end: ReplyEnd, counts: TokenCounts) -> Completion:
        return Completion(
            stop=True,
            model=self._model,
            tokens_predicted=counts.completion,
            tokens_evaluated=counts.prompt,
            tokens_cached=counts.cache.cached,
            generation_settings=GenerationSettings.of(self._params, self._context_length),
            has_new_line=self._has_line_break,
            truncated=self._truncated,
            stop_type="word" if end.stop is not None else "limit" if end.finish is FinishReason.LENGTH else "eos",
            stopping_word=end.stop or "",
            timings=timings_of(counts),
        )


async def fold(chunks: AsyncGenerator[Completion]) -> Completion:
    """The whole reply."""
    parts = [chunk async for chunk in chunks]
    whole = parts[-1]
    whole.content = "".join(part.content for part in parts)
    whole.completion_probabilities = [it for part in parts for it in part.completion_probabilities or ()] or UNSET
    return whole


def _probability(tokenizer: Tokenizer, token: TokenLogprobs) -> Probability:
    picked = _alternative(tokenizer, token.token_id, token.logprob)
    top = [_alternative(tokenizer, token_id, logprob) for token_id, logprob in token.top]
    return Probability(picked.id, picked.token, picked.bytes, picked.logprob, top)


def _alternative(tokenizer: Tokenizer, token_id: int, logprob: float) -> Alternative:
    encoded = list(tokenizer.token_bytes(token_id, show_control=True))
    return Alternative(token_id, token_text(tokenizer, token_id), encoded, finite(logprob))
