"""What is drawn while a reply grows: all that has changed, and nothing beside it."""

from collections.abc import Callable

import pytest
from textual._compositor import ChopsUpdate, Compositor
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from tests.tui.pilots import Chatting, at_rest, run
from tests.tui.scripted_client import USAGE, WAIT, ScriptedClient
from tui.nouns import Finish, ReplyEnd, TextDelta
from tui.screens.compositor import RowCompositor
from tui.widgets.document import Document
from tui.widgets.paragraph import Paragraph

WORDS = "a reply that is drawn as it grows, "
PARTS = [TextDelta(f"{number} {WORDS}" + "\n\n" * (number % 7 == 6)) for number in range(40)]


class Picture:
    """What a terminal shows of the updates that it was sent."""

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
def picture(monkeypatch: pytest.MonkeyPatch) -> Picture:
    """Of whatever screen the chat draws."""
    drawn = Picture()
    render = RowCompositor.render_update

    def rendered(self: RowCompositor, *given: object, **named: object) -> object:
        update = render(self, *given, **named)  # type: ignore[arg-type]
        if update is not None:
            drawn.take(self, update)
        return update

    monkeypatch.setattr(RowCompositor, "render_update", rendered)
    return drawn


def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Widget, Region]]:
    """The widgets that are asked to draw from now on, and which of their regions."""
    asked: list[tuple[Widget, Region]] = []
    draw: Callable[[Widget, Region], list[Strip]] = Widget.render_lines

    def counted(self: Widget, crop: Region) -> list[Strip]:
        asked.append((self, crop))
        return draw(self, crop)

    monkeypatch.setattr(Widget, "render_lines", counted)
    return asked


def test_the_terminal_shows_what_the_screen_is(picture: Picture) -> None:
    async def flow(chat: Chatting) -> None:
        await chat.type("go")
        await chat.until(lambda: chat.conversation.replying is None and len(chat.views()) == 2)
        await chat.pilot.press("x", "enter")
        await chat.until(lambda: chat.conversation.replying is None and len(chat.views()) == 4)
        await chat.pilot.pause()
        strips = chat.screen._compositor.render_strips()
        assert picture.text() == "\n".join(strip.text for strip in strips)
        assert WORDS.split(maxsplit=1)[0] in "".join(strip.text for strip in strips)

    run(ScriptedClient([*PARTS, ReplyEnd(Finish.COMPLETE, USAGE)]), flow)


def test_what_is_beside_a_change_or_below_others_is_not_drawn_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def flow(chat: Chatting) -> None:
        await chat.type("go")
        await chat.until(lambda: len(chat.views()) == 2 and chat.views()[1].query(Document))
        (reply,) = chat.views()[1].query(Document)
        await at_rest(chat.pilot, lambda: reply.region)
        drawn = asked(monkeypatch)
        await reply.grow("more ")
        await chat.until(lambda: drawn)
        assert {widget for widget, _ in drawn} == set(reply.children)
        assert all(region.height <= widget.size.height for widget, region in drawn)

    run(ScriptedClient([PARTS[0], WAIT]), flow, size=(120, 40))


def test_where_a_widget_draws_less_than_it_is_asked_for_what_is_behind_it_is_seen(
    picture: Picture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def flow(chat: Chatting) -> None:
        await chat.type("go")
        await chat.until(lambda: len(chat.views()) == 2 and chat.views()[1].query(Document))
        (reply,) = chat.views()[1].query(Document)
        await at_rest(chat.pilot, picture.text)
        assert WORDS in picture.text()
        with monkeypatch.context() as patch:
            patch.setattr(Paragraph, "render_lines", lambda self, crop: [Strip.blank(3)] * (crop.height // 2))
            await reply.grow("more ")
            await chat.until(lambda: WORDS not in picture.text())
        await reply.grow("and more")
        await chat.until(lambda: f"{WORDS}more and more" in picture.text())

    run(ScriptedClient([PARTS[0], WAIT]), flow, size=(120, 40))
