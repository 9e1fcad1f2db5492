"""Tests for trimming a full context: the dialog, stopping a summary, and the result."""

import re

import pytest

from tests.tui.pilots import Chatting, run
from tests.tui.scripted_client import ScriptedClient
from tui.screens.full_context import FullContextScreen
from tui.types import ChatId, FullContext
from tui.widgets.folded import Folded
from tui.widgets.status_line import StatusLine
from tui.widgets.top_bar import TopBar


def full() -> tuple[ScriptedClient, ChatId]:
    """Return a client with a chat that leaves only a few tokens of the context free."""
    client = ScriptedClient()
    name = client.keep("Long", "first " * 40, "reply " * 40, "second " * 10, "reply " * 10)
    client.context.limit = 1160
    return client, name


async def asked(chat: Chatting) -> None:
    await chat.until(lambda: isinstance(chat.app.screen, FullContextScreen) and chat.label("#goes") != "")


def test_too_long_message_is_not_sent() -> None:
    client = ScriptedClient()
    client.context.limit = 1160
    long = "word " * 400

    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: chat.conversation.model)
        await chat.type(long)
        await chat.until(lambda: chat.composer.area.text == long.strip())
        problem = "This message is 363 tokens too long for this model, even without the messages before it."
        reserve = "1,024 tokens are kept free for the reply."
        assert chat.notices() == [f"{problem} {reserve} Shorten it, or remove an attachment."]
        assert (client.chats.chats, client.replies.asked) == ({}, [])

    run(client, flow)


def test_unknown_context_length_asks_no_question() -> None:
    async def flow(chat: Chatting) -> None:
        chat.client.context.limit = None
        await chat.until(lambda: chat.conversation.model)
        await chat.say("word " * 40_000)
        bar = chat.screen.query_one(StatusLine)
        await chat.until(lambda: bar.budget is not None and bar.budget.history >= 50_000)
        assert "50k tokens (limit unknown)" in str(bar.render())
        assert len(chat.texts()) == 2

    run(ScriptedClient(), flow)


def test_dialog_closes_when_another_window_has_made_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tui.screens.full_context._POLL_SECONDS", 0.01)
    client, name = full()

    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: chat.conversation.model and len(chat.conversation.chat.path()) == 4)
        await chat.type("one more")
        await asked(chat)
        plan = await client.context.plan(name, chat.conversation.chat.leaf, FullContext.DROP_OLDEST, "one more")
        await client.context.trim(name, plan)
        await chat.until(lambda: client.chats.sent == ["one more"])
        assert client.chats.chats[name].left_out == set(plan.messages)

    run(client, flow, chat=name)


def test_dialog_shows_what_another_window_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tui.screens.full_context._POLL_SECONDS", 0.01)
    client, name = full()
    client.context.limit = 8192

    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: chat.conversation.model and len(chat.conversation.chat.path()) == 4)
        await chat.type("/room")
        await asked(chat)
        assert "first first" in chat.label("#goes")
        plan = await client.context.plan(name, chat.conversation.chat.leaf, FullContext.DROP_OLDEST, "")
        await client.context.trim(name, plan)
        await chat.until(lambda: "first first" not in chat.label("#goes") and "second second" in chat.label("#goes"))

    run(client, flow, chat=name)


def test_regenerating_trims_the_context() -> None:
    client, name = full()
    client.context.limit = 1100

    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: chat.conversation.model and len(chat.conversation.chat.path()) == 4)
        await chat.pilot.press("ctrl+y")
        await asked(chat)
        await chat.pilot.press("escape")
        await chat.until(lambda: chat.app.screen is chat.screen)
        await chat.pilot.press("ctrl+y")
        await asked(chat)
        assert client.replies.asked == []
        await chat.pilot.press("down", "enter")
        await chat.until(lambda: len(client.replies.asked) == 1 and chat.conversation.current_reply is None)

    run(client, flow, chat=name)


def test_escape_stops_a_summary() -> None:
    client, name = full()

    async def flow(chat: Chatting) -> None:
        bar = chat.app.screen.query_one(TopBar)
        await chat.until(lambda: chat.conversation.model and len(chat.conversation.chat.path()) == 4)
        await chat.type("one more")
        await asked(chat)
        await chat.pilot.press("enter")
        await chat.until(lambda: bar.activity == "summarizing")
        await chat.pilot.press("escape")
        await chat.until(lambda: chat.composer.area.text == "one more")
        assert bar.activity == ""
        assert client.replies.asked == []
        assert client.chats.chats[name].left_out == frozenset()

    run(client, flow, chat=name)


def test_chat_scrolls_to_its_end_while_it_is_summarized() -> None:
    client, name = full()

    async def flow(chat: Chatting) -> None:
        transcript = chat.conversation.transcript
        await chat.until(lambda: chat.conversation.model and transcript.max_scroll_y > 0)
        await transcript.show_start()
        await chat.type("one more")
        await asked(chat)
        assert any("The context is full" in line for line in chat.lines())
        await chat.pilot.press("enter")
        await chat.until(lambda: any("Summarizing" in line for line in chat.lines()))

    run(client, flow, chat=name, size=(60, 15))


def test_escape_in_another_chat_does_not_stop_a_summary() -> None:
    client, name = full()

    async def flow(chat: Chatting) -> None:
        bar = chat.app.screen.query_one(TopBar)
        await chat.until(lambda: chat.conversation.model and len(chat.conversation.chat.path()) == 4)
        await chat.type("one more")
        await asked(chat)
        await chat.pilot.press("enter")
        await chat.until(lambda: bar.activity == "summarizing")
        await chat.until(lambda: any("Summarizing " in line for line in chat.lines()))
        assert chat.label("#queue") == "next: one more"
        await chat.conversation.open_new()
        await chat.until(lambda: bar.activity == "")
        assert chat.label("#queue") == ""
        await chat.pilot.press("escape")
        await chat.conversation.open(name)
        await chat.until(lambda: bar.activity == "summarizing")
        client.context.summarizes.set()
        await chat.until(lambda: client.chats.chats[name].left_out)
        await chat.until(lambda: bar.activity == "")

    run(client, flow, chat=name)


def test_summary_is_shown_at_its_message() -> None:
    client, name = full()
    client.context.summarizes.set()

    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: chat.conversation.model and len(chat.conversation.chat.path()) == 4)
        await chat.type("one more")
        await asked(chat)
        await chat.pilot.press("enter")
        await chat.until(lambda: len(client.replies.asked) == 1 and chat.conversation.current_reply is None)
        chat.conversation.transcript.scroll_home(animate=False)
        await chat.until(lambda: chat.views()[0].message.text.startswith("first") and chat.app.screen.query(Folded))
        note = chat.views()[1].query_one(Folded)
        assert not note.query_one(".folded-text").display
        chat.views()[1].focus()
        await chat.pilot.press("ctrl+o")
        await chat.until(lambda: note.query_one(".folded-text").display)
        assert str(note.query_one(".folded-text").render()) == "They greeted [each] other."

    run(client, flow, chat=name)


def test_insufficient_plan_cannot_be_chosen() -> None:
    client, name = full()
    client.context.summary_tokens = 200

    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: chat.conversation.model and len(chat.conversation.chat.path()) == 4)
        await chat.type("one more")
        await asked(chat)
        assert re.fullmatch(r"This frees \d+ of the \d+ tokens needed\.", chat.label("#goes"))
        await chat.pilot.press("enter")
        await chat.pilot.press("down")
        await chat.until(lambda: chat.label("#goes").startswith("Frees 120 tokens by dropping:"))

    run(client, flow, chat=name)
