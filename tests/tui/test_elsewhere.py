"""Tests for chats that another window continues."""

from tests.tui.pilots import Chatting, run
from tests.tui.scripted_client import NOON, ScriptedClient
from tui.types import Message, MessageId, Role
from tui.widgets.elsewhere import Elsewhere


def continue_elsewhere(client: ScriptedClient, parent: MessageId | None) -> None:
    """Store a message and its reply, as another window does."""
    (chat,) = client.chats.chats
    question = Message(MessageId("theirs"), parent, Role.USER, "From the other window", NOON)
    client.chats.put(chat, question)
    client.chats.put(chat, Message(MessageId("reply"), question.id, Role.ASSISTANT, "A reply to it", NOON))


def is_continued(chat: Chatting) -> bool:
    return any("This chat was continued in another window." in line for line in chat.lines())


def test_branch_of_another_window_is_reported_and_shown_on_request() -> None:
    client = ScriptedClient()
    chat_id = client.keep("First", "a question", "an answer")

    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: chat.texts() == ["a question", "an answer"])
        await chat.type("typed", enter=False)
        continue_elsewhere(client, None)
        await chat.until(lambda: is_continued(chat))
        assert chat.texts() == ["a question", "an answer"]
        await chat.until(lambda: any("‹ 1/2 ›" in line for line in chat.lines()))
        line = next(row for row, text in enumerate(chat.lines()) if "This chat was continued" in text)
        await chat.pilot.click(offset=(chat.lines()[line].index("Show") + 1, line))
        await chat.until(lambda: chat.texts() == ["From the other window", "A reply to it"])
        await chat.until(lambda: not is_continued(chat))
        assert chat.composer.area.text == "typed"

    run(client, flow, chat=chat_id)


def test_continued_branch_is_not_shown_unasked() -> None:
    client = ScriptedClient()
    chat_id = client.keep("First", "a question", "an answer")

    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: chat.texts() == ["a question", "an answer"])
        continue_elsewhere(client, client.chats.chats[chat_id].leaf)
        await chat.until(lambda: is_continued(chat))
        assert chat.texts() == ["a question", "an answer"]
        await chat.pilot.press("f5")
        await chat.until(lambda: not is_continued(chat))

    run(client, flow, chat=chat_id)


def test_own_messages_are_not_reported() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.say("Hello")
        await chat.screen.query_one(Elsewhere).poll().wait()
        assert not is_continued(chat)

    run(ScriptedClient(), flow)
