"""Tests for when the title of a chat is requested."""

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


def test_title_is_requested_after_the_first_reply_with_text() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.say("one")
        await chat.until(lambda: len(chat.views()) == 2)
        assert chat.client.chats.titled == []
        await chat.say("two")
        await chat.until(lambda: titles(chat) == ["A title of the client"])

    run(ScriptedClient([ReplyEnd(Finish.STOPPED, USAGE)], [TextDelta("yes"), END]), flow)


def test_failed_title_request_shows_no_error() -> None:
    async def flow(chat: Chatting) -> None:
        chat.client.chats.untitled = ClientError("The prompt has 540 tokens.", "Shorten it.")
        await chat.say("one")
        await chat.until(lambda: chat.client.chats.titled)
        await chat.say("two")
        await chat.until(lambda: len(chat.client.chats.titled) == 2)
        await chat.pilot.pause()
        assert chat.notices() == []

    run(ScriptedClient(), flow)
