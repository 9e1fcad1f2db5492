"""Chat completions, OpenAI's dialect: one generator of chunks, which is the streamed reply, and a fold that makes the
whole reply of the same chunks. So the two cannot disagree.
"""

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType

from app.chat.events import (
    ChatEvent,
    PromptLogprobs,
    PromptProgress,
    ReasoningDelta,
    ReplyEnd,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from app.chat.service import ChatService
from app.server.dialects.openai.chat_requests import ChatCompletionRequest
from app.server.dialects.openai.tokens import Identity, Usage, usage_of
from app.server.token_counts import TokenCounts
from app.server.token_reports import (
    FinishText,
    ProgressReport,
    ReportedToken,
    Timings,
    finish_text,
    reported_tokens,
    timings_of,
)
from app.server.turn import Turn, turn_events
from engine.request import Origin

ChatFinishText: TypeAlias = FinishText | Literal["tool_calls"]


class ChoiceLogprobs(Struct):
    content: list[ReportedToken]
    refusal: None = None


class FunctionDelta(Struct):
    arguments: str
    name: str | UnsetType = UNSET  # with the first delta of a call, as are its id and type


class CallDelta(Struct):
    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class Delta(Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET  # the same by its other name
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChunkChoice(Struct):
    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: ChatFinishText | None = None


class ChatCompletionChunk(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType = UNSET  # in the last chunk, which has no choice
    timings: Timings | UnsetType = UNSET  # there, too
    prompt_progress: ProgressReport | UnsetType = UNSET


class CalledFunction(Struct):
    name: str
    arguments: str


class Call(Struct):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class AssistantMessage(Struct):
    content: str | None  # none where it only calls tools
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


class ChatCompletion(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    timings: Timings | UnsetType


async def chunks(
    service: ChatService, wanted: ChatCompletionRequest, origin: Origin
) -> AsyncGenerator[list[ChatCompletionChunk]]:
    """The reply, in batches as it comes; last, if wanted, a chunk that says what it used. Raises what `turn_events`
    raises."""
    counts = TokenCounts()
    writer = _ChunkWriter(service, tells_progress=bool(wanted.return_progress))
    asked, breakers = wanted.grammar(), await service.breakers.tokens(wanted.breakers())
    turn = Turn(wanted.conversation(), wanted.choices(breakers), asked)
    origin = replace(origin, reply=writer.reply)
    async with aclosing(turn_events(service, turn, origin, counts)) as batches:
        async for batch in batches:
            if written := [chunk for index, event in batch for chunk in writer.write(index, event)]:
                yield written
    if wanted.reports_usage:
        yield [writer.usage(counts)]


async def fold(chunks: AsyncGenerator[ChatCompletionChunk]) -> ChatCompletion:
    """The whole reply. The last chunk must be the one about usage."""
    parts: dict[int, _Parts] = {}
    async for chunk in chunks:
        for choice in chunk.choices:
            parts.setdefault(choice.index, _Parts()).add(choice)
        if chunk.usage is not UNSET:
            choices = [parts[index].choice(index) for index in sorted(parts)]
            return ChatCompletion(
                id=chunk.id,
                created=chunk.created,
                model=chunk.model,
                choices=choices,
                usage=chunk.usage,
                timings=chunk.timings,
            )
    raise EOFError("the chunks ended without their usage")


class _ChunkWriter:
    """Writes the chunks of one reply."""

    def __init__(self, service: ChatService, *, tells_progress: bool) -> None:
        """`tells_progress` of the reading of the prompt."""
        self._tells_progress = tells_progress
        self._tokenizer = service.tokenizer
        self._identity = Identity.new("chatcmpl", service.name)
        self._begun: set[int] = set()
        self._calling: set[int] = set()  # choices that have called a tool

    @property
    def reply(self) -> str:
        """Its id."""
        return self._identity.id

    def write(self, index: int, event: ChatEvent) -> Iterator[ChatCompletionChunk]:
        if index not in self._begun:
            self._begun.add(index)
            yield self._chunk(ChunkChoice(index, Delta("assistant", "")))
        match event:
            case TextDelta(text, logprobs):
                report = ChoiceLogprobs(reported_tokens(self._tokenizer, logprobs)) if logprobs else None
                yield self._chunk(ChunkChoice(index, Delta(content=text), report))
            case ReasoningDelta(text):
                yield self._chunk(ChunkChoice(index, Delta(reasoning=text, reasoning_content=text)))
            case ToolCallStart(number, call_id, name):
                self._calling.add(index)
                yield self._call(index, CallDelta(number, FunctionDelta("", name), call_id, "function"))
            case ToolCallDelta(number, arguments):
                yield self._call(index, CallDelta(number, FunctionDelta(arguments)))
            case ReplyEnd(finish):
                reason: ChatFinishText = finish_text(finish)
                if reason == "stop" and index in self._calling:
                    reason = "tool_calls"
                yield self._chunk(ChunkChoice(index, Delta(), finish_reason=reason))
            case PromptProgress() if self._tells_progress:
                chunk = self._chunk(ChunkChoice(index, Delta()))
                chunk.prompt_progress = ProgressReport.of(event)
                yield chunk
            case PromptProgress() | PromptLogprobs() | ToolCallEnd():
                pass

    def _call(self, index: int, delta: CallDelta) -> ChatCompletionChunk:
        return self._chunk(ChunkChoice(index, Delta(tool_calls=[delta])))

    def usage(self, counts: TokenCounts) -> ChatCompletionChunk:
        chunk = self._chunk()
        chunk.usage, chunk.timings = usage_of(counts), timings_of(counts)
        return chunk

    def _chunk(self, *choices: ChunkChoice) -> ChatCompletionChunk:
        identity = self._identity
        return ChatCompletionChunk(
            id=identity.id, created=identity.created, model=identity.model, choices=list(choices)
        )


@dataclass(slots=True)
class _Parts:
    """The chunks of one choice."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[tuple[str, str, list[str]]] = field(default_factory=list)  # id, name, and pieces of the arguments
    reported: list[ReportedToken] = field(default_factory=list)
    has_logprobs: bool = False
    finish: ChatFinishText | None = None

    def add(self, choice: ChunkChoice) -> None:
        delta = choice.delta
        if delta.content is not UNSET:
            self.texts.append(delta.content)
        if delta.reasoning is not UNSET:
            self.thoughts.append(delta.reasoning)
        for call in delta.tool_calls or ():
            self._add_call(call)
        if choice.logprobs is not None:
            self.has_logprobs = True
            self.reported += choice.logprobs.content
        self.finish = choice.finish_reason or self.finish

    def _add_call(self, delta: CallDelta) -> None:
        if delta.id is not UNSET and delta.function.name is not UNSET:
            self.calls.append((delta.id, delta.function.name, []))
        self.calls[delta.index][2].append(delta.function.arguments)

    def choice(self, index: int) -> Choice:
        logprobs = ChoiceLogprobs(self.reported) if self.has_logprobs else None
        text, thought = "".join(self.texts), "".join(self.thoughts) or UNSET
        content = None if self.calls and not text else text
        calls = [Call(call_id, CalledFunction(name, "".join(pieces))) for call_id, name, pieces in self.calls]
        message = AssistantMessage(content, reasoning=thought, reasoning_content=thought, tool_calls=calls or UNSET)
        return Choice(index, message, logprobs, self.finish)
