"""Replies of Ollama's API: the chunks of a streamed reply, written from the events of the service.

The folds make a whole reply from the same chunks, so the two cannot disagree.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Generic, Literal, TypeVar

from msgspec import UNSET, Raw, Struct, UnsetType

from app.generation.events import (
    Batch,
    ChatEvent,
    GeneratedTokens,
    ReasoningDelta,
    ReplyEnd,
    TextDelta,
    TokenCounts,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from app.server.http.endpoint import LINES, Framing
from app.server.http.errors import convert_errors
from app.server.usage import ReportedToken, finish_text, reported_tokens, timings_of
from app.text.tokenizer import Tokenizer
from engine.request import TokenLogprobs

DoneReason = Literal["stop", "length", "load", "unload"]


class Reply(Struct, kw_only=True):
    """A chunk or a whole reply. The last chunk has the counts and times. Times are in nanoseconds."""

    model: str
    created_at: str
    done: bool = False
    done_reason: DoneReason | UnsetType = UNSET
    logprobs: list[ReportedToken] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET  # time in the queue and time to restore cached blocks
    prompt_eval_count: int | UnsetType = UNSET  # tokens of the prompt, cached or computed
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    # parts of the request that the prompt lacks: numbers of images; an extension of this server
    left_out: list[str] | UnsetType = UNSET


class CalledFunction(Struct):
    index: int
    name: str
    arguments: Raw  # a JSON object


class Call(Struct):
    id: str
    function: CalledFunction


class ReplyMessage(Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[Call] | UnsetType = UNSET


class ChatReply(Reply, kw_only=True):
    message: ReplyMessage


class GenerateReply(Reply, kw_only=True):
    response: str = ""
    thinking: str | UnsetType = UNSET
    context: list[int] | UnsetType = UNSET  # token ids of the prompt and the reply, which a later request may continue


ReplyT = TypeVar("ReplyT", bound=Reply)


class _Writer(ABC, Generic[ReplyT]):
    """Writes the chunks of one reply."""

    def __init__(self, model: str, tokenizer: Tokenizer) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._call: ToolCallStart | None = None
        self._arguments: list[str] = []

    def write(self, event: ChatEvent) -> Iterator[ReplyT]:
        match event:
            case TextDelta(text, logprobs):
                yield self._with_logprobs(self._text(text), logprobs)
            case ReasoningDelta(text, logprobs):
                yield self._with_logprobs(self._thinking(text), logprobs)
            case ToolCallStart():
                self._call, self._arguments = event, []
            case ToolCallDelta(_, arguments):
                self._arguments.append(arguments)
            case ToolCallEnd() if self._call is not None:
                arguments = "".join(self._arguments) or "{}"
                function = CalledFunction(self._call.index, self._call.name, Raw(arguments))
                yield self._tool_call(Call(self._call.id, function))

    def framing(self) -> Framing:
        """Return the framing. Empty chunks are sent while no text arrives, so that clients do not give up."""
        return replace(LINES, ping=lambda status: LINES.frame(self._text("")))

    def end(self, reason: DoneReason, counts: TokenCounts | None = None) -> ReplyT:
        """Return the last chunk."""
        reply = self._text("")
        reply.done, reply.done_reason = True, reason
        if counts is not None:
            _add_stats(reply, counts)
        return reply

    def _with_logprobs(self, reply: ReplyT, logprobs: Sequence[TokenLogprobs]) -> ReplyT:
        if logprobs:
            reply.logprobs = reported_tokens(self._tokenizer, logprobs)
        return reply

    def _identity(self) -> dict[str, Any]:
        return _identity(self._model)

    # Subclasses define the following methods.

    @abstractmethod
    def _text(self, text: str) -> ReplyT: ...

    @abstractmethod
    def _thinking(self, text: str) -> ReplyT: ...

    @abstractmethod
    def _tool_call(self, call: Call) -> ReplyT: ...


class ChatWriter(_Writer[ChatReply]):
    def _text(self, text: str) -> ChatReply:
        return ChatReply(**self._identity(), message=ReplyMessage(content=text))

    def _thinking(self, text: str) -> ChatReply:
        return ChatReply(**self._identity(), message=ReplyMessage(thinking=text))

    def _tool_call(self, call: Call) -> ChatReply:
        return ChatReply(**self._identity(), message=ReplyMessage(tool_calls=[call]))


class GenerateWriter(_Writer[GenerateReply]):
    def __init__(self, model: str, tokenizer: Tokenizer, *, reports_context: bool) -> None:
        """Start a reply. With `reports_context`, its last chunk has the ids of the prompt and of the reply."""
        super().__init__(model, tokenizer)
        self._reports_context = reports_context
        self._ids: list[int] = []  # token ids of the reply

    def write(self, event: ChatEvent) -> Iterator[GenerateReply]:
        match event:
            case GeneratedTokens(ids):
                ends = self._tokenizer.end_of_generation_ids
                self._ids += [token_id for token_id in ids if token_id not in ends]
            case ReplyEnd(stop=str(stop)):
                self._ids = _ids_before(stop, self._ids, self._tokenizer)
        yield from super().write(event)

    def end(self, reason: DoneReason, counts: TokenCounts | None = None) -> GenerateReply:
        reply = super().end(reason, counts)
        if self._reports_context and counts is not None:
            reply.context = [*counts.prompts[0], *self._ids]
        return reply

    def _text(self, text: str) -> GenerateReply:
        return GenerateReply(**self._identity(), response=text)

    def _thinking(self, text: str) -> GenerateReply:
        return GenerateReply(**self._identity(), thinking=text)

    def _tool_call(self, call: Call) -> GenerateReply:
        raise ValueError("the reply to a prompt without tools calls a tool")


def empty_chat_reply(model: str, reason: DoneReason) -> ChatReply:
    """Return the reply to a chat without messages."""
    return ChatReply(**_identity(model), message=ReplyMessage(), done=True, done_reason=reason)


def empty_generate_reply(model: str, reason: DoneReason) -> GenerateReply:
    """Return the reply to a request without a prompt."""
    return GenerateReply(**_identity(model), done=True, done_reason=reason)


def _identity(model: str) -> dict[str, Any]:
    return {"model": model, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}


def _ids_before(stop: str, ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """Return the ids of the tokens that end before the stop string starts."""
    pieces = [tokenizer.token_bytes(token_id) for token_id in ids]
    start, end = b"".join(pieces).find(stop.encode()), 0
    for count, piece in enumerate(pieces):
        end += len(piece)
        if start >= 0 and end > start:
            return ids[:count]
    return ids


async def reply_chunks(
    replies: AsyncGenerator[Batch], writer: _Writer[ReplyT], counts: TokenCounts, field: str
) -> AsyncGenerator[list[ReplyT]]:
    """Yield the chunks of a reply in batches. Errors about the prompt name `field`."""
    with convert_errors(field):
        async with aclosing(replies) as batches:
            async for batch in batches:
                chunks = [chunk for _, event in batch for chunk in writer.write(event)]
                ends = [event for _, event in batch if isinstance(event, ReplyEnd)]
                chunks += [writer.end(finish_text(end.finish), counts) for end in ends]
                if chunks:
                    yield chunks


async def fold_chat(chunks: AsyncGenerator[ChatReply]) -> ChatReply:
    """Return the whole reply."""
    whole, parts = await _folded(chunks)
    texts = [part.message for part in parts]
    whole.message = ReplyMessage(
        content="".join(text.content for text in texts),
        thinking="".join(text.thinking or "" for text in texts) or UNSET,
        tool_calls=[call for text in texts for call in text.tool_calls or ()] or UNSET,
    )
    return whole


async def fold_generate(chunks: AsyncGenerator[GenerateReply]) -> GenerateReply:
    """Return the whole reply."""
    whole, parts = await _folded(chunks)
    whole.response = "".join(part.response for part in parts)
    whole.thinking = "".join(part.thinking or "" for part in parts) or UNSET
    return whole


async def _folded(chunks: AsyncGenerator[ReplyT]) -> tuple[ReplyT, list[ReplyT]]:
    """Return the last chunk with all log-probabilities, and all chunks."""
    parts = [chunk async for chunk in chunks]
    whole = parts[-1]
    whole.logprobs = [token for part in parts for token in part.logprobs or ()] or UNSET
    return whole, parts


def _add_stats(reply: Reply, counts: TokenCounts) -> None:
    timings = timings_of(counts)
    reply.total_duration = round(1e9 * counts.total_seconds)
    reply.load_duration = round(1e9 * (counts.queue_seconds + counts.cache.sources.restore_seconds))
    reply.prompt_eval_count = counts.prompt
    reply.prompt_eval_duration = _nanoseconds(timings.prompt_ms)
    reply.eval_count = counts.completion
    reply.eval_duration = _nanoseconds(timings.predicted_ms)
    reply.left_out = [*counts.cache.left_out] or UNSET


def _nanoseconds(milliseconds: float) -> int:
    return round(1e6 * milliseconds)
