"""Tests for the keys of the prompt: readline's keys, and keys that break lines, stop, clear, or quit."""

import asyncio

import pytest

from tests.tui.pilots import Chatting, run
from tests.tui.scripted_client import WAIT, ScriptedClient
from tui.app import ChatApp
from tui.screens.help import HelpScreen
from tui.types import TextDelta


def subtitle(chat: Chatting) -> str:
    return str(chat.composer.area.border_subtitle)


def test_ctrl_c_stops_the_reply_then_clears_the_text_then_quits() -> None:
    client = ScriptedClient([TextDelta("Once"), WAIT])

    async def flow(chat: Chatting) -> None:
        await chat.type("go")
        await chat.until(lambda: len(chat.views()) == 2)
        await chat.type("half typed", enter=False)
        await chat.pilot.press("ctrl+c")
        await chat.until(lambda: chat.conversation.current_reply is None)
        assert chat.composer.area.text == "half typed"
        await chat.pilot.press("ctrl+c")
        assert chat.composer.area.text == ""
        assert chat.app.is_running
        await chat.pilot.press("up")
        assert chat.composer.area.text == "half typed"
        await chat.pilot.press("ctrl+c", "ctrl+c")
        assert "Press ^c again to quit" in subtitle(chat)
        assert chat.notices() == []
        await chat.pilot.press("ctrl+c")
        await chat.until(lambda: not chat.app.is_running)

    run(client, flow)


def test_ctrl_c_closes_a_page() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.pilot.press("f1")
        await chat.until(lambda: isinstance(chat.app.screen, HelpScreen) and chat.app.screen.is_mounted)
        await chat.pilot.press("ctrl+c")
        await chat.until(lambda: chat.app.screen is chat.screen)

    run(ScriptedClient(), flow)


def test_ctrl_d_deletes_in_a_text_and_quits_in_an_empty_prompt() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.pilot.press(*"ab", "home", "ctrl+d")
        assert chat.composer.area.text == "b"
        await chat.pilot.press("ctrl+d", "ctrl+d")
        await chat.until(lambda: not chat.app.is_running)

    run(ScriptedClient(), flow)


@pytest.mark.share(2)
@pytest.mark.parametrize("keys", [["alt+enter"], ["shift+enter"], ["ctrl+j"], ["backslash", "enter"]])
def test_line_break_keys_insert_a_line_break(keys: list[str]) -> None:
    async def flow(chat: Chatting) -> None:
        await chat.pilot.press("a", *keys, "b")
        assert chat.composer.area.text == "a\nb"
        assert chat.client.replies.asked == []

    run(ScriptedClient(), flow)


def test_readline_keys_move_in_a_prompt_with_text() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.say("first")
        await chat.say("second")
        keys = ("ctrl+p", "ctrl+p", "ctrl+n", "ctrl+b", "ctrl+b", "x", "ctrl+f", "y", "ctrl+a", "z", "ctrl+e", "w")
        await chat.pilot.press(*keys)
        assert chat.composer.area.text == "zsecoxnydw"
        await chat.pilot.press("ctrl+b", "ctrl+k")
        assert chat.composer.area.text == "zsecoxnyd"
        await chat.pilot.press("ctrl+w")
        assert chat.composer.area.text == ""
        assert chat.conversation.chat.id is not None

    run(ScriptedClient(), flow)


def test_escape_twice_in_an_empty_prompt_edits_the_last_message() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.say("first")
        await chat.pilot.press("escape")
        assert "Press esc again" in subtitle(chat)
        await chat.pilot.press("escape")
        await chat.until(lambda: chat.composer.area.text == "first")
        assert chat.composer.has_class("editing")
        assert "Press esc again" not in subtitle(chat)

    run(ScriptedClient(), flow)


def test_notices_start_beside_the_title_and_do_not_cover_the_prompt() -> None:
    async def show() -> None:
        app = ChatApp(ScriptedClient())
        async with app.run_test(size=(80, 24), notifications=True) as pilot:
            chat = Chatting(app, pilot, ScriptedClient())
            for number in range(3):
                app.notify(f"Notice {number}", timeout=60)
            await chat.until(lambda: any("Notice 2" in line for line in chat.lines()))
            lines = chat.lines()
            assert "New chat" in lines[0]
            assert "Notice 1" in lines[0]
            assert not any("Notice" in line for line in lines[chat.composer.area.region.y :])

    asyncio.run(show())


def test_escape_after_a_stopped_reply_does_not_offer_to_edit() -> None:
    """The user may press Escape once more, because the reply ends a moment after the first press."""

    async def flow(chat: Chatting) -> None:
        await chat.type("go")
        await chat.until(lambda: len(chat.views()) == 2)
        await chat.pilot.press("escape")
        await chat.until(lambda: chat.conversation.current_reply is None)
        await chat.pilot.press("escape")
        assert "Press esc again" not in subtitle(chat)
        await chat.pilot.press("escape")
        assert "Press esc again" in subtitle(chat)

    run(ScriptedClient([TextDelta("begun "), WAIT, TextDelta("never")]), flow)


def test_empty_prompt_says_that_a_message_is_edited() -> None:
    client = ScriptedClient()
    name = client.keep("Kept", "a question", "an answer")

    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: len(chat.texts()) == 2)
        await chat.pilot.press("ctrl+up", "ctrl+l")
        assert "new text of this message" in str(chat.composer.area.placeholder)
        await chat.pilot.press("escape")
        assert "Ask anything" in str(chat.composer.area.placeholder)

    run(client, flow, chat=name)


def test_recalled_command_opens_no_menu_so_that_up_goes_on() -> None:
    client = ScriptedClient()

    async def flow(chat: Chatting) -> None:
        await chat.say("first")
        await chat.type("/theme hearth-dark")
        await chat.pilot.press("up")
        assert chat.composer.area.text == "/theme hearth-dark"
        assert not chat.composer.menu.is_open
        await chat.pilot.press("up")
        assert chat.composer.area.text == "first"

    run(client, flow)
