"""Tests that the private names of Textual exist, and behave as the chat needs."""

import asyncio
import inspect
import itertools

import pytest
from markdown_it.token import Token
from textual._compositor import ChopsUpdate, Compositor
from textual._time import get_time
from textual._xterm_parser import XTermParser
from textual.dom import DOMNode
from textual.driver import Driver
from textual.events import Key
from textual.geometry import Region
from textual.screen import Screen
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Footer
from textual.widgets._footer import FooterKey
from textual.widgets._markdown import MarkdownBullet, MarkdownListItem, MarkdownParagraph, MarkdownTable
from textual.widgets.markdown import MarkdownBlock, MarkdownFence

from tests.tui.document_page import DocumentPage
from tests.tui.pilots import Chatting, at_rest, run
from tests.tui.scripted_client import USAGE, WAIT, ScriptedClient
from tui.types import Finish, ReplyEnd, TextDelta
from tui.widgets.document import Document
from tui.widgets.status_line import StatusLine
from tui.widgets.textual_internals import start_timer
from tui.widgets.transcript import Transcript

WORDS = "a reply that is drawn as it grows, "
PARTS = [TextDelta(f"{number} {WORDS}" + "\n\n" * (number % 7 == 6)) for number in range(40)]


class Picture:
    """A terminal screen that receives the updates."""

    def __init__(self) -> None:
        self.lines: list[list[str]] = []

    def take(self, compositor: Compositor, update: object) -> None:
        if not isinstance(update, ChopsUpdate):
            self.lines = [[*strip.text] for strip in compositor.render_strips()]
            return
        for y, first, end in update.spans:
            for x, strip in update.chops[y].items():
                for place, sign in enumerate(strip.text if strip is not None else "", x):
                    if first <= place < end:
                        self.lines[y][place] = sign

    def text(self) -> str:
        return "\n".join("".join(line) for line in self.lines)


@pytest.fixture
def restyled(monkeypatch: pytest.MonkeyPatch) -> list[DOMNode]:
    """The widgets whose styles were applied again after they were mounted."""
    nodes: list[DOMNode] = []
    update = DOMNode.update_node_styles

    def record(node: DOMNode, animate: bool = True) -> None:
        nodes.append(node)
        update(node, animate)

    monkeypatch.setattr(DOMNode, "update_node_styles", record)
    return nodes


@pytest.fixture
def picture(monkeypatch: pytest.MonkeyPatch) -> Picture:
    """Record the updates of the chat's screens in a picture."""
    drawn = Picture()
    render = Compositor.render_update

    def rendered(self: Compositor, *given: object, **named: object) -> object:
        update = render(self, *given, **named)  # type: ignore[arg-type]
        if update is not None:
            drawn.take(self, update)
        return update

    monkeypatch.setattr(Compositor, "render_update", rendered)
    return drawn


@pytest.mark.parametrize(
    ("owner", "name", "signature"),
    [
        (Screen, "_compositor_refresh", "(self) -> 'None'"),
        (Compositor, "render_partial_update", "(self) -> 'ChopsUpdate | None'"),
        (
            Compositor,
            "_get_renders",
            "(self, crop: 'Region | None' = None) -> 'Iterable[tuple[Region, Region, list[Strip]]]'",
        ),
        (Driver, "write", "(self, data: 'str') -> 'None'"),
        (MarkdownBlock, "set_content", "(self, content: 'Content') -> 'None'"),
        (MarkdownBlock, "_copy_context", "(self, block: 'MarkdownBlock') -> 'None'"),
        (MarkdownBlock, "_update_from_block", "(self, block: 'MarkdownBlock') -> 'None'"),
        (MarkdownFence, "_update_from_block", "(self, block: 'MarkdownBlock')"),
        (MarkdownTable, "_get_headers_and_rows", "(self) -> 'tuple[list[Content], list[list[Content]]]'"),
        (MarkdownListItem, "__init__", "(self, markdown: 'Markdown', token: 'Token', bullet: 'str') -> 'None'"),
    ],
)
def test_private_methods_keep_their_signatures(owner: type, name: str, signature: str) -> None:
    assert str(inspect.signature(getattr(owner, name))) == signature


def test_alt_enter_of_old_terminals_breaks_the_line() -> None:
    async def flow(_: Chatting) -> None:
        assert [key.key for key in XTermParser().feed("\x1b\r") if isinstance(key, Key)] == ["ctrl+j"]

    run(ScriptedClient(), flow)


def test_blocks_keep_their_private_attributes() -> None:
    async def show() -> None:
        page = DocumentPage("")
        async with page.run_test() as _:
            document, token = page.query_one(Document), Token("paragraph_open", "p", 1)
            assert vars(MarkdownParagraph(document, token)).keys() >= {"_blocks", "_content", "_token"}
            assert vars(MarkdownTable(document, token)).keys() >= {"_headers", "_rows"}
            assert vars(MarkdownListItem(document, token, "1")).keys() >= {"bullet"}
            assert vars(MarkdownFence(document, token, "x")).keys() >= {"code", "lexer"}
            assert MarkdownBullet().symbol

    asyncio.run(show())


def test_incremental_updates_match_the_whole_screen(picture: Picture) -> None:
    async def flow(chat: Chatting) -> None:
        await chat.type("go")
        await chat.until(lambda: chat.conversation.current_reply is None and len(chat.views()) == 2)
        await chat.pilot.press("x", "enter")
        await chat.until(lambda: chat.conversation.current_reply is None and len(chat.views()) == 4)
        await at_rest(chat.pilot, picture.text)
        strips = chat.screen._compositor.render_strips()
        assert picture.text() == "\n".join(strip.text for strip in strips)
        assert WORDS.split(maxsplit=1)[0] in "".join(strip.text for strip in strips)

    run(ScriptedClient([*PARTS, ReplyEnd(Finish.COMPLETE, USAGE)]), flow)


def test_frame_renders_only_changed_widgets(monkeypatch: pytest.MonkeyPatch) -> None:
    async def flow(chat: Chatting) -> None:
        status, rendered = chat.screen.query_one(StatusLine), list[Widget]()
        await chat.until(lambda: status.budget is not None)
        await at_rest(chat.pilot, chat.lines)
        render = Widget.render_lines

        def record(widget: Widget, crop: Region) -> list[Strip]:
            rendered.append(widget)
            return render(widget, crop)

        monkeypatch.setattr(Widget, "render_lines", record)
        status.refresh()
        await chat.until(lambda: status in rendered)
        assert {*rendered} <= {status, *status.ancestors}

    run(ScriptedClient(), flow)


def test_unsettled_screen_draws_no_frame_and_loses_no_change(picture: Picture, monkeypatch: pytest.MonkeyPatch) -> None:
    async def flow(chat: Chatting) -> None:
        await chat.type("go")
        await chat.until(lambda: len(chat.views()) == 2 and chat.views()[1].query(Document))
        (reply,) = chat.views()[1].query(Document)
        before = await at_rest(chat.pilot, picture.text)
        with monkeypatch.context() as patch:
            patch.setattr(Transcript, "is_unsettled", True)
            await reply.grow("more ")
            await chat.pilot.pause(0.2)
            assert picture.text() == before
        await reply.grow("and more")
        await chat.until(lambda: f"{WORDS}more and more" in picture.text())

    run(ScriptedClient([PARTS[0], WAIT]), flow, size=(120, 40))


def test_a_frame_is_drawn_soon_after_the_frame_before() -> None:
    """The timer of frames waits up to two periods after a frame."""

    async def main(chat: Chatting) -> None:
        assert 2 * chat.app.screen._update_timer._interval < 0.01

    run(ScriptedClient(), main)


def test_footer_mounts_its_keys_again_only_if_they_change(restyled: list[DOMNode]) -> None:
    async def flow(chat: Chatting) -> None:
        def keys() -> list[FooterKey]:
            return [*chat.screen.query_one(Footer).query(FooterKey)]

        await chat.say("go")
        before = await at_rest(chat.pilot, keys)
        chat.screen.refresh_bindings()
        assert await at_rest(chat.pilot, keys) == before != []
        await chat.pilot.press("ctrl+up")
        await chat.until(lambda: keys() and keys()[0].description == "Cancel edit")
        await chat.pilot.press("escape")
        await chat.until(lambda: [key.description for key in keys()] == [key.description for key in before])
        assert not any(isinstance(node, FooterKey) for node in restyled)

    run(ScriptedClient(), flow)


def test_timer_that_starts_late_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Textual's timer is, if its time is over when it computes how long to wait."""

    async def flow(chat: Chatting) -> None:
        clock, called = itertools.count(get_time(), 0.002), asyncio.Event()
        with monkeypatch.context() as patch:
            patch.setattr("textual._time.get_time", lambda: next(clock))
            start_timer(chat.screen, 0.001, called.set)
            await called.wait()

    run(ScriptedClient(), flow)
