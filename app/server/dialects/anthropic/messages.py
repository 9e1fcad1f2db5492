"""Messages of Anthropic's API: the events of a streamed reply, written from the events of the service.

`fold` makes a whole reply from the same events, so the two cannot disagree.
"""

import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Struct, UnsetType

from app.generation.cache_report import PromptTokensDetails
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
    ToolCallEnd,
    ToolCallStart,
)
from app.server.http.endpoint import NAMED_EVENTS
from app.server.http.errors import convert_errors
from engine.request import FinishReason

StopReason: TypeAlias = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]

# Signature of thinking blocks. Clients return it with the thinking, and check only that it is present.
_SIGNATURE = "inglenook"


class OutputTokensDetails(Struct):
    thinking_tokens: int


class MessageUsage(Struct, kw_only=True):
    """Token counts. The first three fields add up to the tokens of the prompt.

    All prompts are cached for free, so no tokens count as written to the cache.
    """

    input_tokens: int = 0  # tokens of the prompt that were computed
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int = 0
    output_tokens_details: OutputTokensDetails | UnsetType = UNSET  # set at the end of the reply, like the next field
    # an extension: computed tokens, and the reason of a cache miss
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET

    @classmethod
    def so_far(cls, event: ChatEvent, counts: TokenCounts) -> "MessageUsage":
        """Return the usage at the first event. The cached tokens are known only if prefill took several steps."""
        if not isinstance(event, PromptProgress):
            return cls(input_tokens=counts.prompt_total)
        return cls(input_tokens=event.total - event.cached, cache_read_input_tokens=event.cached)

    @classmethod
    def of(cls, counts: TokenCounts) -> "MessageUsage":
        return cls(
            input_tokens=counts.prompt - counts.cache.sources.cached,
            cache_read_input_tokens=counts.cache.sources.cached,
            output_tokens=counts.completion,
            output_tokens_details=OutputTokensDetails(counts.reasoning),
            prompt_tokens_details=PromptTokensDetails.of(counts.cache),
        )


class TextContent(Struct, tag_field="type", tag="text"):
    text: str


class ThinkingContent(Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class ToolUseContent(Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: Any  # a JSON object


Content: TypeAlias = TextContent | ThinkingContent | ToolUseContent


class MessageReply(Struct, tag_field="type", tag="message", kw_only=True):
    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Content]
    stop_reason: StopReason | None = None  # null until the stream ends
    stop_sequence: str | None = None
    usage: MessageUsage


class TextPiece(Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingPiece(Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignaturePiece(Struct, tag_field="type", tag="signature_delta"):
    signature: str


class InputPiece(Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


Piece: TypeAlias = TextPiece | ThinkingPiece | SignaturePiece | InputPiece


class MessageStart(Struct, tag_field="type", tag="message_start"):
    message: MessageReply


class ContentBlockStart(Struct, tag_field="type", tag="content_block_start"):
    index: int
    content_block: Content


class ContentBlockDelta(Struct, tag_field="type", tag="content_block_delta"):
    index: int
    delta: Piece


class ContentBlockStop(Struct, tag_field="type", tag="content_block_stop"):
    index: int


class MessageOutcome(Struct):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Struct, tag_field="type", tag="message_delta"):
    delta: MessageOutcome
    usage: MessageUsage


class MessageStop(Struct, tag_field="type", tag="message_stop"):
    pass


class Ping(Struct, tag_field="type", tag="ping"):
    pass


Event: TypeAlias = (
    MessageStart | ContentBlockStart | ContentBlockDelta | ContentBlockStop | MessageDelta | MessageStop | Ping
)


FRAMING: Final = replace(NAMED_EVENTS, ping=lambda status: NAMED_EVENTS.frame(Ping()))


async def events(replies: AsyncGenerator[Batch], model: str, counts: TokenCounts) -> AsyncGenerator[list[Event]]:
    """Yield the events of a reply in batches. `counts` is the object that `replies` fills.

    Raises the errors of `ChatService.reply`. Errors about the request become InvalidRequest.
    """
    writer = _EventWriter(model, counts)
    with convert_errors("messages"):
        async with aclosing(replies) as batches:
            async for batch in batches:
                if written := [piece for _, event in batch for piece in writer.write(event)]:
                    yield written


async def fold(events: AsyncGenerator[Event]) -> MessageReply:
    """Return the whole reply. A tool call that was cut off is dropped: a client must not run half of it."""
    blocks: list[_Block] = []
    reply: MessageReply | None = None
    async for event in events:
        match event:
            case MessageStart(message):
                reply = message
            case ContentBlockStart(_, content):
                blocks.append(_Block(content))
            case ContentBlockDelta(_, piece):
                blocks[-1].add(piece)
            case MessageDelta(outcome, usage) if reply is not None:
                reply.content = [one for block in blocks if (one := block.content()) is not None]
                reply.stop_reason, reply.stop_sequence, reply.usage = outcome.stop_reason, outcome.stop_sequence, usage
    if reply is None or reply.stop_reason is None:
        raise EOFError("the events ended without a stop reason")
    return reply


class _EventWriter:
    """Writes the events of one reply."""

    def __init__(self, model: str, counts: TokenCounts) -> None:
        """Start a reply. `counts` are complete when the reply ends."""
        self._model = model
        self._counts = counts
        self._has_started = False
        self._num_blocks = 0
        self._open: Content | None = None
        self._has_called_tool = False

    def write(self, event: ChatEvent) -> Iterator[Event]:
        if not self._has_started:
            self._has_started = True
            message_id = f"msg_{uuid.uuid4().hex}"
            yield MessageStart(
                MessageReply(
                    id=message_id, model=self._model, content=[], usage=MessageUsage.so_far(event, self._counts)
                )
            )
        match event:
            case TextDelta(text):
                yield from self._append(TextContent(""), TextPiece(text)) if text else ()
            case ReasoningDelta(text):
                yield from self._append(ThinkingContent("", ""), ThinkingPiece(text)) if text else ()
            case ToolCallStart(_, call_id, name):
                yield from self._open_block(ToolUseContent(call_id, name, {}))
            case ToolCallDelta(_, arguments):
                yield self._delta(InputPiece(arguments))
            case ToolCallEnd():
                self._has_called_tool = True
                yield from self._close_block()
            case ReplyEnd():
                yield from self._close_block()
                yield MessageDelta(self._outcome(event), MessageUsage.of(self._counts))
                yield MessageStop()
            case PromptProgress() | PromptLogprobs():
                pass

    def _append(self, kind: Content, piece: Piece) -> Iterator[Event]:
        """Yield a piece of a block. If the open block is of another type, first yield the start of a new one."""
        if type(self._open) is not type(kind):
            yield from self._open_block(kind)
        yield self._delta(piece)

    def _open_block(self, content: Content) -> Iterator[Event]:
        yield from self._close_block()
        self._open = content
        yield ContentBlockStart(self._num_blocks, content)

    def _close_block(self) -> Iterator[Event]:
        if self._open is None:
            return
        if isinstance(self._open, ThinkingContent):
            yield self._delta(SignaturePiece(_SIGNATURE))
        yield ContentBlockStop(self._num_blocks)
        self._open = None
        self._num_blocks += 1

    def _delta(self, piece: Piece) -> ContentBlockDelta:
        return ContentBlockDelta(self._num_blocks, piece)

    def _outcome(self, end: ReplyEnd) -> MessageOutcome:
        reason: StopReason = "tool_use" if self._has_called_tool else "end_turn"
        if end.finish is FinishReason.LENGTH:
            reason = "max_tokens"
        elif end.stop is not None:
            reason = "stop_sequence"
        return MessageOutcome(reason, end.stop)


@dataclass(slots=True)
class _Block:
    """The events of one content block."""

    start: Content
    pieces: list[str] = field(default_factory=list)
    signature: str = ""

    def add(self, piece: Piece) -> None:
        match piece:
            case TextPiece(text) | ThinkingPiece(text) | InputPiece(text):
                self.pieces.append(text)
            case SignaturePiece(signature):
                self.signature = signature

    def content(self) -> Content | None:
        """Return the whole block, or None for a tool call whose input was cut off."""
        text = "".join(self.pieces)
        match self.start:
            case TextContent():
                return TextContent(text)
            case ThinkingContent():
                return ThinkingContent(text, self.signature)
            case ToolUseContent(call_id, name):
                arguments = _parse_object(text)
                return None if arguments is None else ToolUseContent(call_id, name, arguments)


def _parse_object(written: str) -> dict[str, Any] | None:
    """Parse a JSON object. Returns None if the text is not one."""
    try:
        return msgspec.json.decode(written or "{}", type=dict[str, Any])
    except msgspec.DecodeError:
        return None
