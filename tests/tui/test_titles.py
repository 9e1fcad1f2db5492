"""Tests for when a chat gets a title."""

from tests.tui.pilots import Chatting, run
from tests.tui.scripted_client import USAGE, WAIT, ScriptedClient
from tui.client import ClientError
from tui.types import Finish, ReplyEnd, TextDelta

END = ReplyEnd(Finish.COMPLETE, USAGE)


def titles(chat: Chatting) -> list[str]:
    return [kept.summary.title for kept in chat.client.chats.chats.values()]


def test_chat_left_before_its_first_reply_ends_gets_a_title() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.type("one")
        await chat.until(lambda: len(chat.views()) == 2)
        await chat.pilot.press("ctrl+n")
        await chat.until(lambda: chat.conversation.chat.id is None)
        chat.client.replies.gate.set()
        await chat.until(lambda: titles(chat) == ["A title of the client"])
        assert chat.conversation.chat.title == "New chat"

    run(ScriptedClient([TextDelta("begun"), WAIT, END]), flow)


def test_empty_reply_gives_no_title_but_the_next_does() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.say("one")
        await chat.until(lambda: len(chat.views()) == 2)
        assert chat.client.chats.titled == []
        await chat.say("two")
        await chat.until(lambda: titles(chat) == ["A title of the client"])

    run(ScriptedClient([ReplyEnd(Finish.STOPPED, USAGE)], [TextDelta("yes"), END]), flow)


def test_failed_title_is_not_an_error() -> None:
    async def flow(chat: Chatting) -> None:
        chat.client.chats.untitled = ClientError("The prompt has 540 tokens.", "Shorten it.")
        await chat.say("one")
        await chat.until(lambda: chat.client.chats.titled)
        await chat.say("two")
        await chat.until(lambda: len(chat.client.chats.titled) == 2)
        await chat.pilot.pause()
        assert chat.notices() == []

    run(ScriptedClient(), flow)
