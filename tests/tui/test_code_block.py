"""Tests for code blocks. They are drawn in parts, so that growing code redraws only its last part."""

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest
from textual.content import Content
from textual.pilot import Pilot
from textual.visual import VisualType
from textual.widgets import Label

from tests.tui.document_page import DocumentPage
from tests.tui.pilots import Chatting
from tests.tui.pilots import run as run_chat
from tests.tui.scripted_client import USAGE, ScriptedClient
from tui.markdown import LONGEST_LINE
from tui.types import Finish, ReplyEnd, ReplyEvent, TextDelta
from tui.widgets.code_block import LONGEST_HIGHLIGHTED, CodeBlock, parts
from tui.widgets.document import Document
from tui.widgets.text_fields import SplitLine

Look = Callable[[DocumentPage, Pilot[None]], Awaitable[None]]
FUNCTION = "def warm(seat):\n    # beside the fire\n\n    return seat in {warmest!r}\n\n"
CODE = FUNCTION * 60


def run(text: str, look: Look) -> None:
    async def show() -> None:
        page = DocumentPage(text)
        async with page.run_test(size=(80, 30)) as pilot:
            await pilot.pause()
            await look(page, pilot)

    asyncio.run(show())


def labels(page: DocumentPage) -> list[Label]:
    return list(page.query(".code-part").results(Label))


def contents(page: DocumentPage) -> list[Content]:
    return [label.visual for label in labels(page) if isinstance(label.visual, Content)]


def shown(page: DocumentPage) -> str:
    return "\n".join(content.plain for content in contents(page))


@pytest.mark.parametrize("code", [CODE, "x" * 20_000, "    deep\n" * 3000, "", "\n\n", "a\n\n" * 3000])
def test_parts_join_to_the_code_and_are_short(code: str) -> None:
    found = list(parts(code))
    assert "\n".join(found) == code
    longest = max(map(len, code.split("\n")))
    assert max(map(len, found)) <= 5000 + longest


def test_parts_start_at_unindented_lines() -> None:
    assert all(part.startswith("def") for part in parts(CODE))


def test_growing_code_does_not_redraw_finished_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    updated: list[Label] = []
    update = Label.update

    def watched(label: Label, content: VisualType = "", *, layout: bool = True) -> None:
        updated.append(label)
        update(label, content, layout=layout)

    monkeypatch.setattr(Label, "update", watched)

    async def look(page: DocumentPage, pilot: Pilot[None]) -> None:
        document, text = page.query_one(Document), CODE
        assert len(text) < LONGEST_HIGHLIGHTED
        while text:
            size = random.randrange(1, 400)
            before = labels(page)
            await document.grow(text[:size])
            text = text[size:]
            assert labels(page)[: len(before)] == before
            assert not set(updated) & set(before[:-1])
            updated.clear()
        await pilot.pause()
        assert len(labels(page)) > len(CODE) // 5000
        assert shown(page) == CODE.rstrip("\n") == page.query_one(CodeBlock).code
        assert all(content.spans for content in contents(page)[:-1])
        assert sum(label.size.height for label in labels(page)) >= CODE.rstrip("\n").count("\n") + 1

    run("```python\n", look)


def test_code_that_becomes_shorter_is_redrawn() -> None:
    """Until the line that closes a fence is complete, it is parsed as code."""

    async def look(page: DocumentPage, pilot: Pilot[None]) -> None:
        document = page.query_one(Document)
        for part in ("``", "`\n\nBehind it."):
            await document.grow(part)
            await pilot.pause()
        assert shown(page) == CODE.rstrip("\n")

    run(f"```python\n{CODE}", look)


def test_very_long_line_is_shortened_and_copied_whole() -> None:
    async def look(page: DocumentPage, _: Pilot[None]) -> None:
        assert shown(page) == f"short\n{line[:LONGEST_LINE]} … {len(line) - LONGEST_LINE:,} more characters\nshort"
        assert page.query_one(CodeBlock).code == f"short\n{line}\nshort"

    line = "x" * 100_000
    run(f"```\nshort\n{line}\nshort\n```", look)


def test_lines_of_a_diff_are_colored() -> None:
    async def look(page: DocumentPage, _: Pilot[None]) -> None:
        (content,) = contents(page)
        styles = {content.plain[span.start : span.end].strip(): str(span.style) for span in content.spans}
        assert styles["-old"] == "$text-error"
        assert styles["+new"] == "$text-success"

    run("```diff\n-old\n+new\n```", look)


@pytest.mark.share(1)
@pytest.mark.parametrize("width", [120, 80, 60])
def test_long_line_ends_with_a_mark_until_it_is_wrapped(width: int) -> None:
    line = "".join(f"word{number} = " for number in range(30)) + "the_end"

    async def flow(chat: Chatting) -> None:
        await chat.say("code")
        await chat.until(lambda: any("word0 =" in shown for shown in chat.lines()))
        (cut,) = [shown.rstrip() for shown in chat.lines() if "word0 =" in shown]
        assert cut.endswith("…")
        await chat.pilot.press("shift+tab", "ctrl+w")
        await chat.until(lambda: any("the_end" in shown for shown in chat.lines()))
        assert not any(shown.rstrip().endswith("…") for shown in chat.lines() if "word" in shown)
        await chat.pilot.press("ctrl+w")
        await chat.until(lambda: any(shown.rstrip().endswith("…") for shown in chat.lines()))
        await click_word(chat, "wrap")
        await chat.until(lambda: any("the_end" in shown for shown in chat.lines()))
        await click_word(chat, "unwrap")
        await chat.until(lambda: any(shown.rstrip().endswith("…") for shown in chat.lines()))

    script: list[ReplyEvent] = [TextDelta(f"```python\nshort\n{line}\n```"), ReplyEnd(Finish.COMPLETE, USAGE)]
    run_chat(ScriptedClient(script), flow, size=(width, 40))


async def click_word(chat: Chatting, word: str) -> None:
    bar = chat.screen.query_one(CodeBlock).query_one(SplitLine)
    await chat.until(lambda: word in bar.render().plain)
    await chat.pilot.click(bar, offset=(bar.render().plain.index(word) + bar.gutter.left, 0))


def test_wrapping_a_message_wraps_all_its_code() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.say("code")
        await chat.until(lambda: len(chat.screen.query(CodeBlock)) == 2)
        first, second = chat.screen.query(CodeBlock)
        first.action_wrap()
        await chat.pilot.press("shift+tab", "ctrl+w")
        assert not first.is_wrapped
        assert not second.is_wrapped
        await chat.pilot.press("ctrl+w")
        assert first.is_wrapped
        assert second.is_wrapped

    script: list[ReplyEvent] = [TextDelta("```\none\n```\n\nText.\n\n```\ntwo\n```"), ReplyEnd(Finish.COMPLETE, USAGE)]
    run_chat(ScriptedClient(script), flow)
