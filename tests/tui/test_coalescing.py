"""Tests for joining deltas: no text is lost, and closing the result closes the source."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from tui.client import ClientError
from tui.coalescing import coalesced, joined
from tui.types import Finish, PromptProgress, ReasoningDelta, ReplyEnd, ReplyEvent, TextDelta


def test_adjacent_deltas_of_one_kind_are_joined() -> None:
    events: list[ReplyEvent] = [
        PromptProgress(1, 9), PromptProgress(9, 9), ReasoningDelta("a"), ReasoningDelta("b"), TextDelta("c"),
        ReasoningDelta("d"), TextDelta("e"), TextDelta("f"), ReplyEnd(Finish.COMPLETE),
    ]  # fmt: skip
    assert joined(events) == [
        PromptProgress(9, 9), ReasoningDelta("ab", 2), TextDelta("c"), ReasoningDelta("d"), TextDelta("ef", 2),
        ReplyEnd(Finish.COMPLETE),
    ]  # fmt: skip


def test_joining_sanitizes_each_character_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = [TextDelta("👨\u200d👩\u200d👧ภาษาไทย\ufdfd🇩🇪") for _ in range(200)]
    sanitized: list[str] = []

    def counted(text: str) -> str:
        sanitized.append(text)
        return text

    monkeypatch.setattr("tui.types.sanitize", counted)
    text = "".join(piece.text for piece in pieces)
    assert [one.text for one in joined(pieces) if isinstance(one, TextDelta)] == [text]
    assert "".join(sanitized) == text


async def source(count: int, error: Exception | None = None) -> AsyncGenerator[ReplyEvent, None]:
    for number in range(count):
        yield TextDelta(f"{number} ")
        if number % 10 == 0:
            await asyncio.sleep(0.001)
    if error is not None:
        raise error


def test_all_text_arrives_in_few_events() -> None:
    async def run() -> list[ReplyEvent]:
        return [event async for event in coalesced(source(500), 0.2)]

    events = asyncio.run(run())
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == "".join(
        f"{n} " for n in range(500)
    )
    assert len(events) < 50


def test_error_is_raised_after_the_text() -> None:
    texts: list[str] = []

    async def run() -> None:
        async for event in coalesced(source(25, ClientError("gone")), 0.001):
            assert isinstance(event, TextDelta)
            texts.append(event.text)

    with pytest.raises(ClientError, match="gone"):
        asyncio.run(run())
    assert "".join(texts).endswith("24 ")


def test_closing_the_generator_closes_its_source() -> None:
    closed = []

    async def endless() -> AsyncGenerator[ReplyEvent, None]:
        try:
            while True:
                yield TextDelta("x")
                await asyncio.sleep(0)
        finally:
            closed.append(True)

    async def run() -> None:
        async with aclosing(coalesced(endless(), 0.001)) as events:
            async for _ in events:
                break

    asyncio.run(run())
    assert closed == [True]
