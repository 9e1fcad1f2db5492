"""The chunks of a chat completion: from the events of its replies to what a stream is made of, and a whole reply is
folded from."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

from app.generation.events import (
    ChatEvent,
    GeneratedTokens,
    PromptLogprobs,
    PromptProgress,
    ReasoningDelta,
    ReplyEnd,
    TextDelta,
    TokenCounts,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from app.generation.service import ChatService
from app.server.dialects.openai.chat import (
    CallDelta,
    ChatCompletionChunk,
    ChatFinishText,
    ChoiceLogprobs,
    ChunkChoice,
    Delta,
    FunctionDelta,
)
from app.server.dialects.openai.chat_requests import ChatCompletionRequest
from app.server.dialects.openai.reporting import ChunkReports
from app.server.dialects.openai.tokens import Identity, prompt_logprobs
from app.server.errors import naming
from app.server.usage import ProgressReport, TokenText, finish_text, id_text, reported_tokens, token_text
from engine.request import Origin, TokenLogprobs


async def chunks(
    service: ChatService, wanted: ChatCompletionRequest, identity: Identity, origin: Origin, counts: TokenCounts
) -> AsyncGenerator[list[ChatCompletionChunk]]:
    """Yield the reply in batches as it comes; last, if wanted, a chunk that says what it used.

    The first batch is empty where the prompt is still being read: nothing with a choice comes before the first token.
    Adds to `counts`. Raises what `ChatService.reply` raises, with errors about the request as InvalidRequest.
    """
    writer = _ChunkWriter(service, wanted, identity, counts)
    options = wanted.generation_options(service)
    replies = service.reply(wanted.conversation(), options, origin, counts)
    has_begun = False
    with naming("messages"):
        async with aclosing(replies) as batches:
            async for batch in batches:
                written = [chunk for index, event in batch for chunk in writer.write(index, event)]
                if written or not has_begun:
                    yield written
                has_begun = True
    if wanted.reports_usage:
        yield [writer.usage()]


class _ChunkWriter:
    """Writes the chunks of one reply."""

    def __init__(
        self,
        service: ChatService,
        wanted: ChatCompletionRequest,
        identity: Identity,
        counts: TokenCounts,
    ) -> None:
        self._wanted = wanted
        self._tokenizer = service.tokenizer
        self._text: TokenText = id_text if wanted.return_tokens_as_token_ids else token_text
        self._identity = identity
        self._counts = counts
        self._reports = ChunkReports(wanted, counts)
        self._begun: set[int] = set()
        self._calling: set[int] = set()  # choices that have called a tool
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    def write(self, index: int, event: ChatEvent) -> Iterator[ChatCompletionChunk]:
        self._reports.see(index, event)
        match event:
            case PromptProgress():
                if self._wanted.return_progress and index == 0:
                    chunk = self._chunk()
                    chunk.prompt_progress = ProgressReport.of(event)
                    yield chunk
            case PromptLogprobs(logprobs):
                self._prompt_logprobs += logprobs if index == 0 else ()
            case GeneratedTokens() | ToolCallEnd():
                pass
            case _:
                if index not in self._begun:
                    self._begun.add(index)
                    yield self._beginning(index)
                if choice := self._choice(index, event):
                    chunk = self._chunk(choice)
                    self._reports.add(chunk)
                    yield chunk

    def _beginning(self, index: int) -> ChatCompletionChunk:
        chunk = self._chunk(ChunkChoice(index, Delta("assistant", "")))
        if self._wanted.return_token_ids and len(self._begun) == 1:
            chunk.prompt_token_ids = [*self._counts.prompts[0]]
        return chunk

    def _choice(self, index: int, event: ChatEvent) -> ChunkChoice | None:
        match event:
            case TextDelta(text, logprobs):
                told = reported_tokens(self._tokenizer, logprobs, self._text)
                return ChunkChoice(index, Delta(content=text), ChoiceLogprobs(told) if logprobs else None)
            case ReasoningDelta(text) if self._wanted.reports_thoughts:
                return ChunkChoice(index, Delta(reasoning=text, reasoning_content=text))
            case ToolCallStart(number, call_id, name):
                self._calling.add(index)
                return _call(index, CallDelta(number, FunctionDelta("", name), call_id, "function"))
            case ToolCallDelta(number, arguments):
                return _call(index, CallDelta(number, FunctionDelta(arguments)))
            case ReplyEnd(finish):
                reason: ChatFinishText = finish_text(finish)
                called = reason == "stop" and index in self._calling
                return ChunkChoice(index, Delta(), finish_reason="tool_calls" if called else reason)
        return None

    def usage(self) -> ChatCompletionChunk:
        chunk = self._chunk()
        self._reports.end(chunk)
        if self._wanted.prompt_logprobs is not None:
            chunk.prompt_logprobs = prompt_logprobs(self._tokenizer, self._prompt_logprobs)
        return chunk

    def _chunk(self, *choices: ChunkChoice) -> ChatCompletionChunk:
        identity = self._identity
        return ChatCompletionChunk(
            id=identity.id, created=identity.created, model=identity.model, choices=list(choices)
        )


def _call(index: int, delta: CallDelta) -> ChunkChoice:
    return ChunkChoice(index, Delta(tool_calls=[delta]))
