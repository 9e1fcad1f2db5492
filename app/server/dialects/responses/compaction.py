"""Compaction of a conversation: its user messages, and one item with a summary of the whole conversation.

The served model writes the summary. Clients send the item instead of the items that it summarizes.
"""

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Annotated, Literal

from msgspec import Meta, Struct

from app.generation.conversation import Conversation, Message
from app.generation.events import TextDelta, TokenCounts
from app.generation.options import GenerationOptions
from app.generation.service import ChatService
from app.server.dialects.responses.input_items import (
    MAX_ITEMS,
    InputItem,
    attachments_in,
    compaction_item,
    items_of,
    messages_of,
)
from app.server.dialects.responses.response import Usage
from app.server.dialects.responses.tools import qualified
from app.server.http.errors import convert_errors
from app.server.request_fields import ModelName
from engine.request import Origin
from engine.sampling_params import SamplingParams

MAX_SUMMARY_TOKENS = 1024

_TASK = (
    "Summarize this conversation so that it can continue without its earlier messages. Keep the goals, decisions, "
    "facts, names, file paths, and open questions. Answer with the summary alone."
)


class CompactRequest(Struct, kw_only=True):
    """POST /v1/responses/compact."""

    model: ModelName | None = None
    input: str | Annotated[list[InputItem], Meta(max_length=MAX_ITEMS)] | None = None
    instructions: str | None = None
    previous_response_id: Annotated[str, Meta(max_length=128)] | None = None


class Compaction(Struct, kw_only=True):
    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int  # Unix time in seconds
    output: list[InputItem]
    usage: Usage


async def compaction(
    service: ChatService, body: CompactRequest, earlier: Sequence[InputItem], origin: Origin
) -> AsyncGenerator[list[Compaction]]:
    """Yield the compaction of the `earlier` items and the items of the request.

    Raises the errors of `ChatService.reply`. Errors about the request become InvalidRequest.
    """
    items = items_of(body.input)
    messages = messages_of(body.instructions, earlier, items, qualified)
    asked = Conversation(_with_task(messages), thinking_budget=0, attachments=[*attachments_in(body.input)])
    summary, counts = await _summary(service, asked, origin)
    kept = [item.to_stored() for item in (*earlier, *items) if item.kind == "message" and item.role == "user"]
    output = [*kept, compaction_item(summary)]
    yield [
        Compaction(id=f"resp_{uuid.uuid4().hex}", created_at=int(time.time()), output=output, usage=Usage.of(counts))
    ]


async def single_compaction(compactions: AsyncGenerator[Compaction]) -> Compaction:
    return await anext(compactions)


async def _summary(service: ChatService, asked: Conversation, origin: Origin) -> tuple[str, TokenCounts]:
    counts = TokenCounts()
    options = GenerationOptions([SamplingParams(temperature=0.0, max_tokens=MAX_SUMMARY_TOKENS)])
    replies = service.reply(asked, options, origin, counts)
    texts: list[str] = []
    with convert_errors("input"):
        async with aclosing(replies) as batches:
            async for batch in batches:
                texts += [event.text for _, event in batch if isinstance(event, TextDelta)]
    return "".join(texts).strip(), counts


def _with_task(messages: Sequence[Message]) -> list[Message]:
    """Append the task to the conversation, in its last message if that is a user message."""
    if messages and messages[-1].role == "user":
        return [*messages[:-1], Message("user", f"{messages[-1].content}\n\n{_TASK}")]
    return [*messages, Message("user", _TASK)]
