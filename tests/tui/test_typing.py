"""Tests for typing and pasting: the order of keys, and line ends."""

import pytest
from textual import events
from textual.widgets import Input, TextArea

from tests.tui.pilots import Chatting, run
from tests.tui.scripted_client import ScriptedClient

LINES = ["line one\nline two\nline three", "line one\rline two\rline three", "line one\r\nline two\r\nline three"]


@pytest.mark.parametrize("height", [3, 4, 6, 8])
def test_typed_text_is_visible_in_low_terminals(height: int) -> None:
    async def flow(chat: Chatting) -> None:
        await chat.type("/se what is typed", enter=False)
        await chat.until(lambda: any("what is typed" in line for line in chat.lines()))
        await chat.pilot.press("home", "ctrl+k")
        await chat.type("/se", enter=False)  # opens suggestions above the prompt
        await chat.until(lambda: any(line.strip(" │") == "/se" for line in chat.lines()))

    run(ScriptedClient(), flow, size=(80, height))


def test_typed_joiners_are_kept() -> None:
    """Emoji of several people and Persian words contain joiners."""
    text = "می\u200cخواهم 👩\u200d👩\u200d👧"

    async def flow(chat: Chatting) -> None:
        for character in text:
            chat.app.post_message(events.Key("x", character))
        await chat.until(lambda: chat.composer.area.text == text)
        await chat.pilot.press("f7")
        await chat.until(lambda: isinstance(chat.app.focused, Input))
        for character in text:
            chat.app.post_message(events.Key("x", character))
        await chat.until(lambda: chat.app.screen.query_one(Input).value == text)

    run(ScriptedClient(), flow)


@pytest.mark.share(1)
@pytest.mark.parametrize("pasted", LINES)
def test_pasted_line_ends_become_line_breaks(pasted: str) -> None:
    async def flow(chat: Chatting) -> None:
        chat.app.post_message(events.Paste(pasted))
        await chat.until(lambda: chat.composer.area.text == LINES[0])
        await chat.pilot.press("ctrl+s")
        await chat.until(lambda: chat.app.screen.query("#system"))
        chat.app.post_message(events.Paste(pasted))
        await chat.until(lambda: chat.app.screen.query_one("#system", TextArea).text == LINES[0])
        await chat.pilot.press("ctrl+s")
        await chat.until(lambda: chat.conversation.chat.settings.system == LINES[0])
        await chat.pilot.press("f7")
        await chat.until(lambda: isinstance(chat.app.focused, Input))
        chat.app.post_message(events.Paste(pasted + "\r"))
        await chat.until(lambda: chat.app.screen.query_one(Input).value == LINES[0].replace("\n", " "))

    run(ScriptedClient(), flow)


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"])
def test_long_paste_with_any_line_endings_becomes_an_attachment(end: str) -> None:
    async def flow(chat: Chatting) -> None:
        chat.app.post_message(events.Paste(f"line{end}" * 40))
        await chat.until(lambda: "pasted-1.txt" in chat.label("#attached"))
        assert chat.composer.prompt.attachments[0].text == "line\n" * 40

    run(ScriptedClient(), flow)


def test_simultaneous_keys_take_effect_in_order() -> None:
    async def flow(chat: Chatting) -> None:
        chat.at_once(*"abx", "backspace", *"cd", "ctrl+j", *"e", "left", *"f")
        await chat.until(lambda: chat.composer.area.text == "abcd\nfe")
        chat.composer.area.write("")
        chat.at_once(*"/pi", "tab", *" x")
        await chat.until(lambda: chat.composer.area.text == "/pin x")
        chat.composer.area.write("")
        chat.at_once(*"one", "enter", *"two", "up", "down")
        await chat.until(lambda: chat.texts() == ["one", "Hello."])
        await chat.until(lambda: chat.composer.area.text == "two")  # on a loaded machine, the reply can be first
        await chat.pilot.press("ctrl+s")
        await chat.until(lambda: chat.app.screen.query("#system"))
        chat.at_once(*"abx", "backspace", *"cd", "left", *"e")
        await chat.until(lambda: chat.app.screen.query_one("#system", TextArea).text == "abced")
        await chat.pilot.press("ctrl+s")
        await chat.until(lambda: chat.conversation.chat.settings.system == "abced")
        await chat.pilot.press("f7")
        await chat.until(lambda: isinstance(chat.app.focused, Input))
        chat.at_once(*"abx", "backspace", *"cd", "home", *"e")
        await chat.until(lambda: chat.app.screen.query_one(Input).value == "eabcd")

    run(ScriptedClient(), flow)


def test_paste_and_keys_of_one_read_take_effect_in_order() -> None:
    async def flow(chat: Chatting) -> None:
        chat.at_once(*"ab", "left")
        chat.app.post_message(events.Paste("1\n2"))
        chat.at_once("x", "backspace", "c", "enter")
        chat.app.post_message(events.Paste("line\n" * 50))
        chat.at_once(*"d", "enter")
        await chat.until(lambda: chat.texts() == ["a1\n2cb", "Hello.", "d", "Hello."])
        assert chat.views()[2].message.attachments[0].text == "line\n" * 50

    run(ScriptedClient(), flow)
