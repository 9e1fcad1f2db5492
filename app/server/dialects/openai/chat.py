"""Chat completions of OpenAI's API: the chunks of a streamed reply, written from the events of the service.

`fold` makes a whole reply from the same chunks, so the two cannot disagree.
"""

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType

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
from app.server.dialects.openai.chat_requests import ChatCompletionRequest
from app.server.dialects.openai.reports import (
    FINGERPRINT,
    ChunkReports,
    Identity,
    PromptLogprobList,
    Usage,
    prompt_logprobs,
)
from app.server.http.endpoint import EVENTS
from app.server.http.errors import convert_errors
from app.server.http.holds import EarlyEvents, Wait
from app.server.served_models import ServedModels
from app.server.usage import (
    FinishText,
    ProgressReport,
    ReportedToken,
    Timings,
    TokenText,
    finish_text,
    id_text,
    reported_tokens,
    token_text,
)
from engine.request import Origin, TokenLogprobs

ID_PREFIX = "chatcmpl"  # start of the ids of replies

ChatFinishText: TypeAlias = FinishText | Literal["tool_calls"]


class ChoiceLogprobs(Struct):
    content: list[ReportedToken]
    refusal: None = None


class FunctionDelta(Struct):
    arguments: str
    name: str | UnsetType = UNSET  # set in the first delta of a call, like the id and type of the call


class CallDelta(Struct):
    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class Delta(Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET  # a second name of `reasoning`
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChunkChoice(Struct):
    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: ChatFinishText | None = None
    token_ids: list[int] | UnsetType = UNSET  # tokens since the choice's previous chunk


class LoadReport(Struct):
    """Progress of the load of the model for which a request waits."""

    status: str  # such as "loading qwen3:8b, 43 %"
    progress: float  # share of the current stage that is done, from 0 to 1


class ChatCompletionChunk(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    system_fingerprint: str = FINGERPRINT
    usage: Usage | UnsetType = UNSET  # sent in the last chunk, which has no choice, or in all chunks on request
    timings: Timings | UnsetType = UNSET  # sent in the same chunks as `usage`
    prompt_progress: ProgressReport | UnsetType = UNSET  # sent only in chunks without a choice, like the next field
    load_progress: LoadReport | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET  # sent in the first chunk with a choice
    prompt_logprobs: PromptLogprobList | UnsetType = UNSET  # sent in the last chunk


class CalledFunction(Struct):
    name: str
    arguments: str


class Call(Struct):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class AssistantMessage(Struct):
    content: str | None  # null if the reply only calls tools
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[Call] | UnsetType = UNSET


class Choice(Struct):
    index: int
    message: AssistantMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: ChatFinishText | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    timings: Timings | UnsetType
    system_fingerprint: str = FINGERPRINT
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobList | UnsetType = UNSET


async def fold(chunks: AsyncGenerator[ChatCompletionChunk]) -> ChatCompletion:
    """Return the whole reply. The last chunk must have the usage."""
    parts: dict[int, _Parts] = {}
    prompt_ids: list[int] | UnsetType = UNSET
    async for chunk in chunks:
        prompt_ids = prompt_ids or chunk.prompt_token_ids
        for choice in chunk.choices:
            parts.setdefault(choice.index, _Parts()).add(choice)
        if chunk.usage is not UNSET and not chunk.choices:
            choices = [parts[index].choice(index) for index in sorted(parts)]
            return ChatCompletion(
                id=chunk.id,
                created=chunk.created,
                model=chunk.model,
                choices=choices,
                usage=chunk.usage,
                timings=chunk.timings,
                prompt_token_ids=prompt_ids,
                prompt_logprobs=chunk.prompt_logprobs,
            )
    raise EOFError("the stream ended without a chunk that has `usage`")


@dataclass(slots=True)
class _Parts:
    """The chunks of one choice."""

    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[tuple[str, str, list[str]]] = field(default_factory=list)  # id, name, and pieces of the arguments
    reported: list[ReportedToken] = field(default_factory=list)
    has_logprobs: bool = False
    token_ids: list[int] | UnsetType = UNSET
    finish: ChatFinishText | None = None

    def add(self, choice: ChunkChoice) -> None:
        delta = choice.delta
        if delta.content is not UNSET:
            self.texts.append(delta.content)
        if delta.reasoning is not UNSET:
            self.reasoning.append(delta.reasoning)
        for call in delta.tool_calls or ():
            self._add_call(call)
        if choice.logprobs is not None:
            self.has_logprobs = True
            self.reported += choice.logprobs.content
        if choice.token_ids is not UNSET:
            self.token_ids = self.token_ids or []
            self.token_ids += choice.token_ids
        self.finish = choice.finish_reason or self.finish

    def _add_call(self, delta: CallDelta) -> None:
        if delta.id is not UNSET and delta.function.name is not UNSET:
            self.calls.append((delta.id, delta.function.name, []))
        self.calls[delta.index][2].append(delta.function.arguments)

    def choice(self, index: int) -> Choice:
        logprobs = ChoiceLogprobs(self.reported) if self.has_logprobs else None
        text, reasoning = "".join(self.texts), "".join(self.reasoning) or UNSET
        content = None if self.calls and not text else text
        calls = [Call(call_id, CalledFunction(name, "".join(pieces))) for call_id, name, pieces in self.calls]
        message = AssistantMessage(content, reasoning=reasoning, reasoning_content=reasoning, tool_calls=calls or UNSET)
        return Choice(index, message, logprobs, self.finish, self.token_ids)


class LoadChunks(EarlyEvents):
    """Reports the load of a model for which a stream waits. `identity` is that of the stream once it has started."""

    seconds = 0.5

    def __init__(self, models: ServedModels, body: ChatCompletionRequest) -> None:
        super().__init__(EVENTS)
        self.identity: Identity | None = None
        self._models = models
        self._body = body

    async def opening(self) -> bytes:
        name = (await self._models.names.find(self._body.model)).reply_name
        self.identity = Identity.new(ID_PREFIX, name, self._body.request_id)
        return b""

    def progress(self, wait: Wait) -> bytes:
        if self.identity is None:
            return super().progress(wait)
        chunk = _chunk(self.identity)
        chunk.load_progress = LoadReport(wait.status, round(wait.fraction, 4))
        return EVENTS.frame(chunk)


async def chunks(
    service: ChatService, body: ChatCompletionRequest, identity: Identity, origin: Origin, counts: TokenCounts
) -> AsyncGenerator[list[ChatCompletionChunk]]:
    """Yield the chunks of a reply in batches, and at the end the usage if the request asks for it.

    The first batch is empty during prefill: no chunk with a choice is sent before the first token. Adds to `counts`.
    Raises the errors of `ChatService.reply`. Errors about the request become InvalidRequest.
    """
    writer = _ChunkWriter(service, body, identity, counts)
    options = body.generation_options(service)
    replies = service.reply(body.conversation(), options, origin, counts)
    has_started = False
    with convert_errors("messages"):
        async with aclosing(replies) as batches:
            async for batch in batches:
                chunks_of_batch = [chunk for index, event in batch for chunk in writer.write(index, event)]
                if chunks_of_batch or not has_started:
                    yield chunks_of_batch
                has_started = True
    if body.reports_usage:
        yield [writer.usage()]


class _ChunkWriter:
    """Writes the chunks of one reply."""

    def __init__(
        self,
        service: ChatService,
        body: ChatCompletionRequest,
        identity: Identity,
        counts: TokenCounts,
    ) -> None:
        self._body = body
        self._tokenizer = service.tokenizer
        self._text: TokenText = id_text if body.return_tokens_as_token_ids else token_text
        self._identity = identity
        self._counts = counts
        self._reports = ChunkReports(body, counts)
        self._started: set[int] = set()
        self._calling: set[int] = set()  # choices that have called a tool
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    def write(self, index: int, event: ChatEvent) -> Iterator[ChatCompletionChunk]:
        self._reports.count_event(index, event)
        match event:
            case PromptProgress():
                if self._body.return_progress and index == 0:
                    chunk = self._chunk()
                    chunk.prompt_progress = ProgressReport.of(event)
                    yield chunk
            case PromptLogprobs(logprobs):
                self._prompt_logprobs += logprobs if index == 0 else ()
            case GeneratedTokens() | ToolCallEnd():
                pass
            case _:
                if index not in self._started:
                    self._started.add(index)
                    yield self._first_chunk(index)
                if choice := self._choice(index, event):
                    chunk = self._chunk(choice)
                    self._reports.add_to_chunk(chunk)
                    yield chunk

    def _first_chunk(self, index: int) -> ChatCompletionChunk:
        chunk = self._chunk(ChunkChoice(index, Delta("assistant", "")))
        if self._body.return_token_ids and len(self._started) == 1:
            chunk.prompt_token_ids = [*self._counts.prompts[0]]
        return chunk

    def _choice(self, index: int, event: ChatEvent) -> ChunkChoice | None:
        match event:
            case TextDelta(text, logprobs):
                reported = reported_tokens(self._tokenizer, logprobs, self._text)
                return ChunkChoice(index, Delta(content=text), ChoiceLogprobs(reported) if logprobs else None)
            case ReasoningDelta(text) if self._body.reports_reasoning:
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
        self._reports.add_totals(chunk)
        if self._body.prompt_logprobs is not None:
            chunk.prompt_logprobs = prompt_logprobs(self._tokenizer, self._prompt_logprobs)
        return chunk

    def _chunk(self, *choices: ChunkChoice) -> ChatCompletionChunk:
        return _chunk(self._identity, *choices)


def _chunk(identity: Identity, *choices: ChunkChoice) -> ChatCompletionChunk:
    return ChatCompletionChunk(id=identity.id, created=identity.created, model=identity.model, choices=list(choices))


def _call(index: int, delta: CallDelta) -> ChunkChoice:
    return ChunkChoice(index, Delta(tool_calls=[delta]))
