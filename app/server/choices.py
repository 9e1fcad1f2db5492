"""The choices of one request: several generations at once, heard as one, and what they used together.

They share the blocks of equal prompts through the prefix cache, from the first step that computes one. Nothing here
knows a wire format.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from app.chat.events import ChatEvent, ReplyEnd
from app.chat.service import ChatService
from app.server.errors import ReplyAborted, ReplyFailed
from engine.request import FinishReason, SamplingParams

ItemT = TypeVar("ItemT")


@dataclass(slots=True)
class TokenCounts:
    """Tokens of all choices of a request. A prompt that several choices continue counts once."""

    prompt: int = 0
    cached: int = 0  # of the prompts', as the first choice of each found them
    completion: int = 0

    def add(self, end: ReplyEnd, *, first_of_prompt: bool) -> None:
        """Count a choice that has ended."""
        self.completion += end.completion_tokens
        if first_of_prompt:
            self.prompt += end.prompt_tokens
            self.cached += end.cached_tokens


async def generate_choices(
    service: ChatService,
    prompts: Sequence[tuple[int, ...]],
    params: Sequence[SamplingParams],
    cache_salt: str,
    *,
    continues_text: bool = False,
) -> AsyncGenerator[tuple[int, ChatEvent]]:
    """Continue each prompt once with each of `params`; yields (choice, event), choices in order of prompts.

    Raises what `ChatService.generate` raises; ReplyFailed or ReplyAborted where the engine gave one up. Closing the
    generator ends all of them.
    """
    sources = [
        service.generate(prompt, one, cache_salt=cache_salt, continues_text=continues_text)
        for prompt in prompts
        for one in params
    ]
    async with aclosing(merge(sources)) as events:
        async for index, event in events:
            if isinstance(event, ReplyEnd):
                _check_finish(event)
            yield index, event


def _check_finish(end: ReplyEnd) -> None:
    if end.finish is FinishReason.ERROR:
        raise ReplyFailed(f"The engine failed: {end.error}", "Try again.")
    if end.finish is FinishReason.ABORT:
        raise ReplyAborted("The engine is being stopped", "Try again when it runs.")


async def merge(sources: Sequence[AsyncGenerator[ItemT]]) -> AsyncGenerator[tuple[int, ItemT]]:
    """What the sources yield, as it comes, with each one's index. Ends after all of them; raises what one raises.

    When it ends, however it does, all sources are closed.
    """
    # As long as nobody takes them, each source has one item here and one in its hand.
    items: asyncio.Queue[tuple[int, ItemT] | Exception | None] = asyncio.Queue(len(sources))
    pumps = [asyncio.create_task(_pump(index, source, items)) for index, source in enumerate(sources)]
    running = len(pumps)
    try:
        while running:
            item = await items.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    index: int, source: AsyncGenerator[ItemT], items: "asyncio.Queue[tuple[int, ItemT] | Exception | None]"
) -> None:
    async with aclosing(source):
        try:
            async for item in source:
                await items.put((index, item))
        except Exception as error:  # noqa: BLE001  # it belongs to whoever reads the merged items
            await items.put(error)
        else:
            await items.put(None)
