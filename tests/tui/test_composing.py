"""Tests for composing a message: files, pasted text, commands, settings, and a full context."""

import asyncio
from pathlib import Path

import pytest
from textual import events
from textual.widgets import Input, Select, TextArea

from tests.tui.pilots import Chatting, run
from tests.tui.scripted_client import USAGE, WAIT, ScriptedClient
from tui.engine_types import ModelInfo
from tui.screens.dialog import Ask, Confirm
from tui.screens.full_context import FullContextScreen
from tui.screens.settings import SettingsScreen
from tui.types import ChatSettings, Finish, FullContext, Preset, ReplyEnd, Sampling, TextDelta
from tui.widgets.status_line import StatusLine

END = ReplyEnd(Finish.COMPLETE, USAGE)


async def paste(chat: Chatting, text: str) -> None:
    chat.composer.area.post_message(events.Paste(text))
    await chat.pilot.pause()


def test_estimated_token_counts_are_marked(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("some notes " * 40)
    client = ScriptedClient()
    client.replies.is_estimating = True

    async def flow(chat: Chatting) -> None:
        await paste(chat, f"'{path}'")
        await chat.until(lambda: chat.label("#attached").startswith("+ notes.txt (~110 tokens)"))

    run(client, flow)


def test_files_and_long_pastes_become_attachments_with_token_counts(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("some notes " * 40)

    async def flow(chat: Chatting) -> None:
        await paste(chat, f"'{path}'")
        await chat.until(lambda: chat.label("#attached").startswith("+ notes.txt (110 tokens)"))
        await paste(chat, "line\n" * 50)
        await chat.until(lambda: "pasted-1.txt (62 tokens)" in chat.label("#attached"))
        await paste(chat, "one line " * 2000)
        await chat.until(lambda: "pasted-2.txt" in chat.label("#attached"))
        await paste(chat, "line\n" * 60)
        await chat.until(lambda: "pasted-3.txt" in chat.label("#attached"))
        await chat.pilot.press("x", "backspace")
        assert "pasted-3.txt" in chat.label("#attached")
        await chat.pilot.press("backspace")
        await chat.until(lambda: "pasted-3.txt" not in chat.label("#attached"))
        assert "pasted-2.txt" in chat.label("#attached")
        await paste(chat, "short \x1b]52;c;eA==\x07")
        assert chat.composer.area.text == "short ␛]52;c;eA==␇"
        await chat.say("")
        (sent, _) = chat.conversation.chat.path()
        assert [one.name for one in sent.attachments] == ["notes.txt", "pasted-1.txt", "pasted-2.txt"]
        assert not chat.composer.query_one("#attached").display
        await chat.type(f"/attach {tmp_path}/none.txt")
        await chat.until(lambda: any("There is no file" in notice for notice in chat.notices()))

    run(ScriptedClient(), flow)


@pytest.mark.parametrize("sent_early", [True, False])
def test_attachments_show_characters_until_their_tokens_are_counted(tmp_path: Path, *, sent_early: bool) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("some notes " * 40)
    client = ScriptedClient()
    client.replies.counts = asyncio.Event()

    async def flow(chat: Chatting) -> None:
        assert client.replies.counts is not None
        await paste(chat, f"'{path}'")
        await chat.until(lambda: chat.label("#attached").startswith("+ notes.txt (440 characters)"))
        if sent_early:
            await chat.say("")
            await chat.until(lambda: chat.label("AttachedFile WordButtons") == "▸ notes.txt (440 characters)")
            client.replies.counts.set()
        else:
            client.replies.counts.set()
            await chat.until(lambda: chat.label("#attached").startswith("+ notes.txt (110 tokens)"))
            client.replies.counts.clear()  # the count is known
            await chat.say("")
        await chat.until(lambda: chat.label("AttachedFile WordButtons") == "▸ notes.txt (110 tokens)")

    run(client, flow)


def test_sent_attachment_is_unfolded_by_a_key_and_by_a_click(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("First line\nSecond line")

    async def flow(chat: Chatting) -> None:
        await paste(chat, f"'{path}'")
        await chat.say("What is this?")
        await chat.until(lambda: chat.label("AttachedFile WordButtons").startswith("▸ notes.txt"))
        chat.views()[0].focus()
        await chat.pilot.press("ctrl+o")
        await chat.until(lambda: chat.label("AttachedFile WordButtons").startswith("▾ notes.txt"))
        await chat.pilot.pause()
        assert [line.count("Second line") for line in chat.lines()].count(1) == 1
        await chat.pilot.click("AttachedFile WordButtons", offset=(3, 0))
        await chat.until(lambda: chat.label("AttachedFile WordButtons").startswith("▸ notes.txt"))

    run(ScriptedClient(), flow)


def test_attachments_are_counted_again_with_another_model(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("some notes " * 40)
    client = ScriptedClient()
    client.models.others = (ModelInfo("qwen3:1b", "Q8_0", 1_000_000, installed=True),)

    async def flow(chat: Chatting) -> None:
        await paste(chat, f"'{path}'")
        await chat.say("")
        await paste(chat, f"'{path}'")
        await chat.until(lambda: chat.label("AttachedFile WordButtons") == "▸ notes.txt (110 tokens)")
        client.replies.token_length = 2
        await chat.type("/load qwen3:1b")
        await chat.until(lambda: chat.label("AttachedFile WordButtons") == "▸ notes.txt (220 tokens)")
        await chat.until(lambda: chat.label("#attached").startswith("+ notes.txt (220 tokens)"))

    run(client, flow)


def test_commands_are_suggested_completed_and_rejected() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.pilot.press("/", "s", "e")
        await chat.until(lambda: {"/settings", "/search TEXT"} <= {one.label for one in chat.composer.menu._shown})
        await chat.pilot.press("t", "t", "tab")
        assert chat.composer.area.text == "/settings"
        chat.composer.area.write("/nonsense at all")
        await chat.pilot.press("enter")
        await chat.until(lambda: any("Unknown command /nonsense" in notice for notice in chat.notices()))
        assert chat.composer.area.text == "/nonsense at all"
        assert chat.client.replies.asked == []

    run(ScriptedClient(), flow)


def test_status_line_shows_how_full_the_context_is() -> None:
    async def flow(chat: Chatting) -> None:
        bar = chat.app.screen.query_one(StatusLine)
        await chat.until(lambda: bar.budget is not None)
        assert "context 0 %" in str(bar.render())
        await chat.type("word " * 400, enter=False)
        await chat.until(lambda: bar.budget is not None and bar.budget.history == 499)

    run(ScriptedClient(), flow)


def test_settings_dialog_checks_values_and_applies_presets() -> None:
    client = ScriptedClient()
    client.chats.kept_presets["pirate"] = Preset(
        "pirate", ChatSettings("Talk like a pirate.", Sampling(temperature=1.5))
    )

    async def flow(chat: Chatting) -> None:
        await chat.pilot.press("ctrl+s")
        await chat.until(lambda: chat.app.screen.query("#system"))
        chat.app.screen.query_one("#system", TextArea).insert("Be brief.")
        chat.app.screen.query_one("#temperature", Input).value = "hot"
        await chat.pilot.press("ctrl+s")
        await chat.until(lambda: chat.label(".problem") == "✗ Temperature must be a number.")
        assert getattr(chat.app.focused, "id", "") == "temperature"
        assert chat.notices() == []
        chat.app.screen.query_one("#temperature", Input).value = "0.5"
        await chat.pilot.press("ctrl+s")
        await chat.until(lambda: chat.conversation.chat.settings.system == "Be brief.")
        await chat.say("hello")
        (kept,) = client.chats.chats.values()
        assert kept.settings == ChatSettings("Be brief.", Sampling(temperature=0.5))
        await chat.type("/preset pirate")
        await chat.until(lambda: chat.conversation.chat.settings.system == "Talk like a pirate.")
        await chat.type("/system")
        await chat.until(lambda: chat.app.focused is not None and chat.app.focused.id == "system")
        assert chat.conversation.chat.settings.system == "Talk like a pirate."
        await chat.pilot.press("escape")
        await chat.type("/system Be kind.")
        await chat.until(lambda: chat.conversation.chat.settings.system == "Be kind.")
        await chat.type("/preset none")
        await chat.until(lambda: chat.conversation.chat.settings == ChatSettings())

    run(client, flow)


def test_full_context_dialog_previews_dropped_messages() -> None:
    client = ScriptedClient()
    name = client.keep("Long", "first " * 40, "reply " * 40, "second " * 10, "reply " * 10)
    client.context.limit = 1160

    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: len(chat.conversation.chat.path()) == 4)
        await chat.type("one more")
        await chat.until(lambda: isinstance(chat.app.screen, FullContextScreen))
        await chat.until(lambda: "Frees 120 tokens by summarizing:" in chat.label("#goes"))
        assert "You: first first" in chat.label("#goes")
        await chat.pilot.press("escape")
        await chat.until(lambda: chat.composer.area.text == "one more")
        assert client.replies.asked == []
        await chat.pilot.press("enter")
        await chat.until(lambda: isinstance(chat.app.screen, FullContextScreen) and chat.label("#goes") != "")
        await chat.pilot.press("down", "enter")
        await chat.until(lambda: len(client.replies.asked) == 1 and chat.conversation.current_reply is None)
        assert len(client.chats.chats[name].left_out) == 2
        chat.conversation.transcript.scroll_home(animate=False)
        await chat.until(lambda: "no longer in context" in str(chat.views()[0].query_one("MessageHeader").render()))

    run(client, flow, chat=name)


def test_full_context_is_an_error_if_the_chat_is_set_to_stop() -> None:
    client = ScriptedClient([TextDelta("x"), END])
    name = client.keep("Long", "first " * 2000, "reply")
    client.context.limit = 2200

    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: len(chat.texts()) == 2)
        await chat.conversation.configure(chat.conversation.chat, ChatSettings(full_context=FullContext.STOP))
        await chat.type("one more")
        await chat.until(lambda: any("tokens over the limit" in notice for notice in chat.notices()))
        assert chat.composer.area.text == "one more"

    run(client, flow, chat=name)


def test_presets_are_saved_and_deleted_from_any_field() -> None:
    client = ScriptedClient()

    async def flow(chat: Chatting) -> None:
        presets = client.chats.kept_presets
        await chat.pilot.press("ctrl+s")
        await chat.until(lambda: isinstance(chat.app.focused, TextArea) and chat.app.focused.id == "system")
        await chat.pilot.press("f8")
        await chat.until(lambda: "Select a preset first." in chat.notices())
        await chat.pilot.press(*"Brief", "f5")
        await chat.until(lambda: isinstance(chat.app.screen, Ask))
        await chat.pilot.press(*"short", "enter")
        await chat.until(lambda: "short" in presets)
        assert presets["short"].settings.system == "Brief"
        await chat.until(lambda: isinstance(chat.app.screen, SettingsScreen))
        chosen = chat.app.screen.query_one("#preset", Select)
        await chat.until(lambda: chosen.value == "short")
        chat.app.screen.query_one("#temperature", Input).focus()
        await chat.pilot.press("f8")
        await chat.until(lambda: isinstance(chat.app.screen, Confirm))
        await chat.pilot.press("tab", "enter")
        await chat.until(lambda: not presets)

    run(client, flow)


@pytest.mark.parametrize("end", ["enter", "escape"])
def test_up_key_does_not_recall_an_edited_reply(end: str) -> None:
    async def flow(chat: Chatting) -> None:
        await chat.say("question")
        chat.views()[1].focus()
        await chat.pilot.press("ctrl+up")
        await chat.until(lambda: chat.composer.area.text == "Hello.")
        if end == "enter":
            await chat.type("!", enter=False)
        await chat.pilot.press(end)
        await chat.until(lambda: chat.composer.area.text == "")
        await chat.pilot.press("up")
        assert chat.composer.area.text == "question"

    run(ScriptedClient(), flow)


def test_up_takes_a_queued_message_back() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.type("go")
        await chat.until(lambda: len(chat.views()) == 2)
        await chat.type("first")
        await chat.type("second")
        await chat.until(lambda: "second" in chat.label("#queue"))
        await chat.pilot.press("up")
        assert chat.composer.area.text == "second"
        assert "second" not in chat.label("#queue")
        assert "first" in chat.label("#queue")

    run(ScriptedClient([TextDelta("Once"), WAIT]), flow)
