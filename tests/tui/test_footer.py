"""Tests for the keys in the footer: those of the moment, in whole words."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from textual.containers import Vertical
from textual.widget import Widget
from textual.widgets import Footer

from tests.tui.pilots import Chatting, at_rest, run
from tests.tui.scripted_client import USAGE, WAIT, ScriptedClient
from tui.screens.dialog import Confirm
from tui.types import Finish, ReplyEnd, TextDelta

IDLE = "F1 Help F5 New F6 Chats F7 Search F2 Models F3 Engine"


def footer(chat: Chatting) -> str:
    return " ".join(chat.lines()[-1].split())


async def shows(chat: Chatting, keys: str) -> None:
    await chat.until(lambda: footer(chat) == keys)


def test_footer_shows_how_to_stop_and_queue_during_a_reply() -> None:
    client = ScriptedClient([TextDelta("begun"), WAIT, ReplyEnd(Finish.COMPLETE, USAGE)])

    async def flow(chat: Chatting) -> None:
        await shows(chat, IDLE)
        await chat.type("go")
        await shows(chat, "esc Stop ⏎ Queue F1 Help F5 New F6 Chats F7 Search")
        await chat.pilot.press("shift+tab")
        await chat.until(lambda: "esc Stop" in footer(chat) and "Retry" in footer(chat))
        await chat.pilot.press("down")
        client.replies.gate.set()
        await shows(chat, IDLE)

    run(client, flow, size=(60, 15))


def test_footer_shows_how_to_end_editing() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.say("go")
        await chat.pilot.press("ctrl+up")
        await shows(chat, f"esc Cancel edit ⏎ Send as branch {IDLE.removesuffix(' F2 Models F3 Engine')}")
        await chat.pilot.press("escape")
        await shows(chat, f"{IDLE} ^g Editor")

    run(ScriptedClient(), flow, size=(80, 24))


def test_footer_of_an_edited_reply_offers_to_save_until_it_is_saved() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.say("go")
        chat.views()[1].focus()
        await chat.pilot.press("ctrl+up")
        await chat.until(lambda: footer(chat).startswith("esc Cancel edit ⏎ Save as branch"))
        await chat.type("!")
        await shows(chat, f"{IDLE} ^g Editor")
        header = chat.lines()[chat.views()[1].region.y]
        assert "smollm2:135m  ‹ 2/2 ›" in header
        assert "edited" in header

    run(ScriptedClient(), flow, size=(80, 24))


def test_branch_keys_are_shown_only_for_messages_with_branches() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.say("go")
        await chat.pilot.press("shift+tab")
        await chat.until(lambda: "⏎ Code, links" in footer(chat))
        assert "Branch" not in footer(chat)
        await chat.pilot.press("ctrl+y")
        await chat.until(lambda: len(chat.client.replies.asked) == 2 and chat.conversation.current_reply is None)
        chat.views()[1].focus()
        await chat.until(lambda: "← Branch ‹ → Branch ›" in footer(chat))

    run(ScriptedClient(), flow, size=(120, 40))


@pytest.mark.share(2)
@pytest.mark.parametrize("width", [30, 60, 80, 100, 119, 120])
def test_footer_shows_whole_words_in_any_width(width: int) -> None:
    client = ScriptedClient()
    client.keep("Kept", "a question", "an answer")

    async def flow(chat: Chatting) -> None:
        await chat.pilot.press("f6")
        await chat.until(lambda: "Rename" in footer(chat))
        keys = chat.app.screen.query_one(Footer)
        assert keys.max_scroll_x == 0
        assert footer(chat).startswith("esc Back ^e Rename")

    run(client, flow, size=(width, 24))


def test_dialog_shows_its_own_keys() -> None:
    async def flow(chat: Chatting) -> None:
        chat.screen.open_address("https://example.org")
        await chat.until(lambda: isinstance(chat.app.screen, Confirm) and chat.app.screen.query(".dialog"))
        assert "⏎ answer" in str(chat.app.screen.query_one(".dialog", Vertical).border_subtitle)
        assert not chat.screen.query_one(Footer).visible
        await chat.pilot.press("right")
        assert chat.app.focused is not None
        assert chat.app.focused.id == "yes"
        await chat.pilot.press("escape")
        await shows(chat, f"{IDLE} ^g Editor")

    run(ScriptedClient(), flow)


def colors(chat: Chatting, field: Widget) -> set[object]:
    """Return the backgrounds of the cells of a widget."""
    part = chat.app.screen._compositor.render_strips()[field.region.y + field.region.height // 2]
    return {one.style and one.style.bgcolor for one in part.crop(field.region.x, field.region.right)}


def test_color_of_buttons_follows_the_focus() -> None:
    async def flow(chat: Chatting) -> None:
        chat.screen.open_address("https://example.org")
        await chat.until(lambda: isinstance(chat.app.screen, Confirm) and chat.app.screen.query("#yes"))
        no, yes = chat.app.screen.query_one("#no"), chat.app.screen.query_one("#yes")
        focused, other = await at_rest(chat.pilot, lambda: (colors(chat, no), colors(chat, yes)))
        assert len(focused) == len(other) == 1
        await chat.pilot.press("right")
        assert await at_rest(chat.pilot, lambda: (colors(chat, no), colors(chat, yes))) == (other, focused)

    run(ScriptedClient(), flow)


def test_prompt_shows_no_cursor_below_a_dialog() -> None:
    async def flow(chat: Chatting) -> None:
        area = chat.composer.area
        assert len(await at_rest(chat.pilot, lambda: colors(chat, area))) == 2
        chat.screen.open_address("https://example.org")
        await chat.until(lambda: isinstance(chat.app.screen, Confirm) and chat.app.screen.query("#yes"))
        assert len(await at_rest(chat.pilot, lambda: colors(chat, area))) == 1
        await chat.pilot.press("escape")
        await chat.until(lambda: len(colors(chat, area)) == 2)

    run(ScriptedClient(), flow)


@pytest.mark.parametrize(("key", "page"), [("f2", "F2 Models"), ("f3", "F3 Engine")])
def test_footer_does_not_offer_the_page_that_is_shown(key: str, page: str) -> None:
    async def flow(chat: Chatting) -> None:
        await chat.pilot.press(key)
        await chat.until(lambda: "esc" in footer(chat) and "F1 Help" in footer(chat))
        assert page not in footer(chat)

    run(ScriptedClient(), flow, size=(120, 40))


def test_footer_offers_to_undo_after_a_deletion() -> None:
    client = ScriptedClient()
    name = client.keep("Kept", "a question", "an answer")

    async def flow(chat: Chatting) -> None:
        await chat.pilot.press("f6")
        await chat.until(lambda: "Rename" in footer(chat))
        assert "Undo" not in footer(chat)
        await chat.pilot.press("delete")
        await chat.until(lambda: isinstance(chat.app.screen, Confirm) and chat.app.screen.query("#yes"))
        await chat.pilot.press("right", "enter")
        await chat.until(lambda: "^z Undo" in footer(chat))

    run(client, flow, chat=name, size=(120, 40))


@pytest.mark.parametrize("folder", ["tui", "app/chat_backend"])
def test_texts_write_keys_as_the_footer_does(folder: str) -> None:
    """No string besides a docstring writes "Ctrl+A", "Ctrl-A", "Esc", or the name of a binding for a key."""
    other = re.compile(r"\b(Ctrl[+-][A-Z]|Esc\b|ctrl\+[a-z] (?!in ))")
    root = Path(__file__).parents[2]
    found = [
        f"{path.relative_to(root)}: {text}"
        for path in sorted((root / folder).rglob("*.py"))
        for text in _texts(ast.parse(path.read_text()))
        if other.search(text)
    ]
    assert found == []


def _texts(tree: ast.Module) -> Iterator[str]:
    statements = {id(one.value) for one in ast.walk(tree) if isinstance(one, ast.Expr)}
    for one in ast.walk(tree):
        if isinstance(one, ast.Constant) and isinstance(one.value, str) and id(one) not in statements:
            yield one.value
