"""Join reply events that arrive faster than the screen can show them."""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from itertools import groupby

from tui.types import PromptProgress, ReasoningDelta, ReplyEvent, TextDelta


async def coalesced(events: AsyncGenerator[ReplyEvent, None], interval: float) -> AsyncGenerator[ReplyEvent, None]:
    """Yield the same events with adjacent deltas of one kind joined, in at most one batch per `interval` seconds.

    Closing this generator closes `events`. If `events` raises an exception, this generator yields the preceding events
    and then raises it.
    """
    batch: list[ReplyEvent] = []
    arrived = asyncio.Event()

    async def read() -> None:
        try:
            async for event in events:
                batch.append(event)
                arrived.set()
        finally:
            arrived.set()

    reading = asyncio.create_task(read())
    try:
        while not reading.done() or batch:
            await arrived.wait()
            arrived.clear()
            current = list(batch)
            batch.clear()
            for event in joined(current):
                yield event
            if not reading.done():
                await asyncio.wait([reading], timeout=interval)
        await reading
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await events.aclose()


def joined(events: Iterable[ReplyEvent]) -> list[ReplyEvent]:
    """Join adjacent deltas of one kind. Keep only the last of adjacent progress reports.

    The cost is linear in the text: each run is joined once, because every new event is sanitized as a whole.
    """
    result: list[ReplyEvent] = []
    for kind, run in groupby(events, type):
        texts = list(run)
        if kind is TextDelta or kind is ReasoningDelta:
            deltas = [one for one in texts if isinstance(one, kind)]
            result.append(kind("".join(one.text for one in deltas), sum(one.tokens for one in deltas)))
        elif kind is PromptProgress:
            result.append(texts[-1])
        else:
            result += texts
    return result
