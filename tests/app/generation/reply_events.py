"""Generates one reply to a prompt of token ids, for tests."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from app.generation.events import ChatEvent
from app.generation.options import PLAIN_REPLY, GenerationOptions, ReplyOptions
from app.generation.service import ChatService
from engine.request import PROGRAM, Origin
from engine.sampling_params import SamplingParams


async def reply_events(
    service: ChatService,
    prompt: tuple[int, ...],
    params: SamplingParams,
    *,
    reply: ReplyOptions = PLAIN_REPLY,
    origin: Origin = PROGRAM,
) -> AsyncGenerator[ChatEvent]:
    """Yield the events of the reply, one by one.

    Closing the generator ends it. Raises what `ChatService.reply` raises.
    """
    async with aclosing(service.reply([prompt], GenerationOptions([params], reply=reply), origin)) as batches:
        async for batch in batches:
            for _, event in batch:
                yield event
