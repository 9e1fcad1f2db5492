"""The text that `ingle run` prints while a model writes it."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from app.commands.run import _print_text
from app.generation.events import ChatEvent, ReasoningDelta, TextDelta
from app.progress import SilentProgress

HOSTILE = "a\x1b]0;owned\x07b\x9b2J\u202ec"


def test_replies_and_reasoning_have_no_escape_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    async def events() -> AsyncGenerator[ChatEvent]:
        yield ReasoningDelta(HOSTILE)
        yield TextDelta(HOSTILE)

    assert asyncio.run(_print_text(events(), SilentProgress(), thoughts=True)) == HOSTILE
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("a]0;ownedb2Jc\n", "a]0;ownedb2Jc\n\n")
