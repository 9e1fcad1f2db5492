"""Tests for fast users: they press keys during other work, and leave chats that are being drawn."""

import random

import pytest
from textual.css.query import NoMatches
from textual.events import Key
from textual.widget import Widget
from textual.widgets import OptionList
from textual.worker import WorkerFailed

from tests.tui.pilots import Chatting, run
from tests.tui.scripted_client import USAGE, WAIT, Script, ScriptedClient
from tui.commands import COMMANDS
from tui.screens.chat import ChatScreen
from tui.screens.choice import ChoiceScreen
from tui.screens.help import HelpScreen
from tui.screens.models import ModelsScreen
from tui.types import Finish, ReasoningDelta, ReplyEnd, TextDelta
from tui.widgets.document import Document
from tui.widgets.folded import Reasoning
from tui.widgets.growing import DocumentText
from tui.widgets.listing import Listing
from tui.widgets.message_view import MessageView
from tui.widgets.reply_text import ReplyText

WORDS = ["A", "**bold**", "house,", "`code`", "and", "*some*", "words", "that", "go", "on", "and", "on.", ""]
ENDS = (" ", " ", " ", "\n\n", "\n- ", "\n\n1. ", "\n```\n", "\n| a | b |\n|---|---|\n")
# The key of the command palette is not included, because random keys could choose Quit there.
COMMON = ("ctrl+n", "escape", "pageup", "pagedown", "ctrl+home", "ctrl+end", "up", "down", "tab", "delete", "space")
KEYS = (*COMMON, *COMMON, *(one.key for one in COMMANDS if one.key and " " not in one.key and one.name != "quit"))
WIDTHS = (*range(60, 140), *(1, 2, 5, 10, 20, 40) * 6)
HEIGHTS = (*range(20, 50), *(1, 2, 3, 5, 8) * 3)
PAUSES = (0.0, 0.0, 0.01, 0.03, 0.1)  # seconds


def reply() -> Script:
    deltas = [
        TextDelta(" ".join(random.choices(WORDS, k=random.randrange(1, 12))) + random.choice(ENDS))
        for _ in range(random.randrange(20, 120))
    ]
    reasoning = [ReasoningDelta(f"thought {number} ") for number in range(random.choice((0, 0, 9)))]
    return [*reasoning, *deltas, ReplyEnd(Finish.COMPLETE, USAGE)]


@pytest.fixture(autouse=True)
def drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tui.widgets.reply_text._LONGEST_REST", 0.01)


def test_random_keys_do_not_break_the_chat() -> None:
    async def flow(chat: Chatting) -> None:
        for _ in range(12):
            if random.random() < 0.2:
                await chat.pilot.resize_terminal(random.choice(WIDTHS), random.choice(HEIGHTS))
            for key in (random.choice(KEYS), *random.choice(("go", "x", "")), random.choice(("enter", "escape"))):
                chat.app.simulate_key(key)
            await chat.pilot.pause(random.choice(PAUSES))
            assert chat.app.is_running
            assert chat.screen.is_attached

    run(ScriptedClient(*(reply() for _ in range(12))), flow, size=(120, 40))


def test_choosing_a_row_twice_closes_one_screen() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.pilot.press("f2")
        await chat.until(lambda: isinstance(chat.app.screen, ModelsScreen) and chat.app.screen.is_mounted)
        screen, listing = chat.app.screen, chat.app.screen.query_one(Listing)
        await chat.until(lambda: listing.row_count)
        for _ in range(2):
            listing.action_select_cursor()
        await chat.until(lambda: chat.app.screen is not screen)
        await chat.pilot.pause()
        assert isinstance(chat.app.screen, ChatScreen)

    run(ScriptedClient(), flow)


def test_palette_dismissed_twice_keeps_the_chat() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.pilot.press("ctrl+backslash")
        await chat.until(lambda: isinstance(chat.app.screen, ChoiceScreen))
        palette = chat.app.screen
        for _ in range(2):
            palette.dismiss(None)
        await chat.pilot.pause()
        assert isinstance(chat.app.screen, ChatScreen)
        await chat.say("go")

    run(ScriptedClient(), flow)


def test_chat_can_be_left_right_after_a_frame() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.type("go")
        await chat.until(lambda: len(chat.views()) == 2 and chat.views()[1].query("MarkdownParagraph"))
        (text,) = chat.views()[1].query(ReplyText)
        (paragraph,) = text.query("MarkdownParagraph").results(Widget)
        await text.remove()
        for late in (text._fold_far, text._after_layout):
            late()
        await text._change([Document("gone")], DocumentText("gone"))
        text.add("more")
        await text._show_waiting()
        assert paragraph._get_style(".strong") is not None

    run(ScriptedClient([TextDelta("a **bold** reply"), WAIT]), flow)


def test_failed_queries_during_exit_are_ignored() -> None:
    async def flow(chat: Chatting) -> None:
        chat.app.exit()
        await chat.app._shutdown()
        for error in (NoMatches("none"), WorkerFailed(NoMatches("none"))):
            chat.app._handle_exception(error)
        assert chat.app.return_code == 0

    run(ScriptedClient(), flow)


def test_uncomposed_reasoning_ignores_updates() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.type("go")
        await chat.until(lambda: chat.app.screen.query(Reasoning))
        reasoning = chat.app.screen.query_one(Reasoning)
        await reasoning.remove_children()
        reasoning.add("more", 1.0)
        reasoning.action_fold()

    run(ScriptedClient([ReasoningDelta("a thought"), WAIT]), flow)


def test_keys_after_quit_are_ignored() -> None:
    async def flow(chat: Chatting) -> None:
        chat.app.exit()
        await chat.app._close_all()
        for key in ("x", "enter", "f1"):
            await chat.app.on_event(Key(key, None))

    run(ScriptedClient(), flow)


def test_late_action_on_a_closed_chat_does_not_affect_the_next() -> None:
    client = ScriptedClient()

    async def flow(chat: Chatting) -> None:
        await chat.say("go")
        message, asked = chat.views()[-1].message, len(client.replies.asked)
        await chat.pilot.press("ctrl+n")
        await chat.until(lambda: not chat.views())
        for late in (
            MessageView.RegenerateAsked(message),
            MessageView.EditAsked(message),
            MessageView.BranchAsked(message, 1),
        ):
            chat.conversation.post_message(late)
        await chat.pilot.pause()
        assert len(client.replies.asked) == asked
        assert not chat.composer.has_class("editing")

    run(client, flow)


def test_screen_closed_while_opening_closes_once_mounted() -> None:
    async def flow(chat: Chatting) -> None:
        screen = HelpScreen()
        chat.app.push_screen(screen)
        assert not screen.is_mounted
        screen.dismiss(None)
        assert chat.app.screen is screen
        await chat.until(lambda: isinstance(chat.app.screen, ChatScreen))

    run(ScriptedClient(), flow)


@pytest.mark.share(2)
@pytest.mark.parametrize("page", ["pageup", "pagedown"])
@pytest.mark.parametrize("keys", [["ctrl+f", *"one"], ["ctrl+backslash"]])
def test_page_keys_are_ignored_in_a_list_without_space(keys: list[str], page: str) -> None:
    def choices(chat: Chatting) -> OptionList:
        (found,) = chat.app.screen.query(OptionList)
        return found

    async def flow(chat: Chatting) -> None:
        await chat.say("one")
        await chat.pilot.resize_terminal(1, 1)
        await chat.pilot.press(*keys)
        await chat.until(lambda: choices(chat).highlighted == 0)
        for key in ("down", page, page):  # the second key arrives before the list has noticed that it has the focus
            chat.app.simulate_key(key)
        await chat.pilot.press(page)
        assert chat.app.is_running

    run(ScriptedClient(), flow)


@pytest.mark.parametrize("size", [(1, 1), (2, 24), (80, 1)])
def test_chat_runs_in_any_terminal_size(size: tuple[int, int]) -> None:
    async def flow(chat: Chatting) -> None:
        await chat.pilot.resize_terminal(*size)
        await chat.say("go")
        await chat.pilot.resize_terminal(80, 24)
        assert chat.texts() == ["go", "Once upon a time."]

    run(ScriptedClient([TextDelta("Once upon a time."), ReplyEnd(Finish.COMPLETE, USAGE)]), flow)
