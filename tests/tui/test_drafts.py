"""Tests that unsent text, attachments, and queued messages are not lost, and that private chats save none of them."""

import asyncio
import operator
from functools import partial
from pathlib import Path

import pytest

from tests.tui.pilots import Chatting, run
from tests.tui.scripted_client import USAGE, WAIT, ScriptedClient
from tui.screens.full_context import FullContextScreen
from tui.types import Chat, ChatId, ChatSettings, Finish, FullContext, ReplyEnd, Role, TextDelta
from tui.widgets.top_bar import TopBar

END = ReplyEnd(Finish.COMPLETE, USAGE)


@pytest.fixture
def notes(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "one.txt", tmp_path / "two.txt"]
    for path in paths:
        path.write_text(path.name)
    return paths


def attached(chat: Chatting) -> list[str]:
    return [one.name for one in chat.composer.prompt.attachments]


def has_files(chat: Chatting, count: int) -> bool:
    return len(attached(chat)) == count


def test_attachments_stay_while_commands_run(notes: list[Path]) -> None:
    async def flow(chat: Chatting) -> None:
        for number, path in enumerate(notes):
            await chat.type(f"/attach {path}")
            await chat.until(partial(has_files, chat, number + 1))
        await chat.type("/pin")
        await chat.type("/nonsense")
        await chat.until(lambda: chat.composer.area.text == "/nonsense")
        assert attached(chat) == ["one.txt", "two.txt"]

    run(ScriptedClient(), flow)


def test_attachments_stay_with_their_chat(notes: list[Path]) -> None:
    client = ScriptedClient()
    name = client.keep("Kept", "a question", "an answer")

    async def flow(chat: Chatting) -> None:
        chat.composer.attach_path(notes[0])
        await chat.conversation.open(name)
        assert attached(chat) == []
        chat.composer.attach_path(notes[1])
        await chat.pilot.press("ctrl+n")
        await chat.until(lambda: chat.conversation.chat.id is None)
        assert attached(chat) == []
        [draft] = [chat.id for chat in await client.chats.summaries() if not chat.message_count]
        await chat.conversation.open(draft)
        assert (attached(chat), chat.composer.area.text) == (["one.txt"], "")
        await chat.conversation.open(name)
        assert attached(chat) == ["two.txt"]
        await chat.say("look")
        await chat.conversation.open_new()
        await chat.conversation.open(name)
        assert attached(chat) == []

    run(client, flow)


def test_queued_messages_are_part_of_the_draft() -> None:
    client = ScriptedClient([TextDelta("first"), WAIT, END], [TextDelta("second"), WAIT, END])

    def drafts() -> set[str]:
        return set(filter(None, client.chats.drafts.values()))

    async def flow(chat: Chatting) -> None:
        await chat.type("one")
        await chat.until(lambda: len(chat.views()) == 2)
        await chat.type("two")
        await chat.type("three")
        await chat.type("typed", enter=False)
        await chat.until(lambda: drafts() == {"two\n\nthree\n\ntyped"})
        client.replies.gate.set()
        await chat.until(lambda: len(chat.views()) == 4 and drafts() == {"three\n\ntyped"})

    run(client, flow)
    assert client.chats.drafts[next(iter(client.chats.chats))] == "three\n\ntyped"


def test_last_input_is_saved_at_exit() -> None:
    client = ScriptedClient()

    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: None in client.chats.drafts)
        chat.at_once(*"what was typed last", "ctrl+q")
        await chat.until(lambda: not chat.app.is_running)

    run(client, flow)
    assert client.chats.drafts == {None: "what was typed last"}


def test_last_input_stays_in_the_chat_that_is_left() -> None:
    client = ScriptedClient()
    name = client.keep("Kept", "a question", "an answer")

    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: chat.conversation.chat.id == name)
        chat.at_once(*"for this chat", "f5")
        await chat.until(lambda: chat.conversation.chat.id is None)
        assert client.chats.drafts[name] == "for this chat"

    run(client, flow, chat=name)


def test_unread_draft_is_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    client = ScriptedClient()
    client.chats.drafts[None] = "of before"

    async def never() -> list[str]:
        await asyncio.Event().wait()
        return []

    async def flow(chat: Chatting) -> None:
        await chat.composer.save_draft()
        assert client.chats.drafts == {None: "of before"}

    monkeypatch.setattr(client.chats, "inputs", never)
    run(client, flow)
    assert client.chats.drafts == {None: "of before"}


def test_message_is_saved_while_a_dialog_asks_about_it() -> None:
    client = ScriptedClient()
    name = client.keep("Long", "first " * 2000, "reply")
    client.context.limit = 2200

    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: len(chat.texts()) == 2)
        await chat.type("one more")
        await chat.until(lambda: isinstance(chat.app.screen, FullContextScreen))
        await chat.until(lambda: client.chats.drafts.get(name) == "one more")

    run(client, flow, chat=name)


def test_editing_keeps_the_draft() -> None:
    client = ScriptedClient()

    async def flow(chat: Chatting) -> None:
        await chat.say("one")
        (name,) = client.chats.chats
        await chat.type("my draft", enter=False)
        await chat.until(lambda: client.chats.drafts.get(name) == "my draft")
        for _ in range(2):  # the draft must survive a second edit as well
            await chat.pilot.press("ctrl+up")
            await chat.until(lambda: chat.composer.area.text == "one")
        await chat.composer.save_draft()
        assert client.chats.drafts[name] == "my draft"
        await chat.pilot.press("escape")
        await chat.until(lambda: chat.composer.area.text == "my draft")
        await chat.pilot.press("ctrl+up")
        await chat.until(lambda: chat.composer.area.text == "one")
        await chat.say(" more")
        assert chat.texts() == ["one more", "Hello."]
        assert chat.composer.area.text == "my draft"
        await chat.pilot.press("ctrl+up")
        await chat.until(lambda: chat.composer.area.text == "one more")
        await chat.conversation.open_new()
        assert client.chats.drafts[name] == "my draft"
        await chat.conversation.open(name)
        assert chat.composer.area.text == "my draft"

    run(client, flow)


def test_edit_that_cannot_be_sent_returns_to_the_prompt() -> None:
    client = ScriptedClient([TextDelta("x"), END])
    name = client.keep("Long", "first " * 2000, "reply", "last", "reply")
    client.context.limit = 2200

    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: len(chat.texts()) == 4)
        await chat.conversation.configure(chat.conversation.chat, ChatSettings(full_context=FullContext.STOP))
        await chat.type("my draft", enter=False)
        await chat.pilot.press("ctrl+up")
        await chat.until(lambda: chat.composer.area.text == "last")
        await chat.type(" one")
        await chat.until(lambda: any("tokens over the limit" in notice for notice in chat.notices()))
        await chat.until(lambda: chat.composer.area.text == "last one")
        await chat.pilot.press("escape")
        await chat.until(lambda: chat.composer.area.text == "my draft")

    run(client, flow, chat=name)


def test_chat_that_starts_as_private_saves_no_draft_and_keeps_that_of_the_last_window() -> None:
    client = ScriptedClient()
    client.chats.drafts[None] = "of before"

    async def flow(chat: Chatting) -> None:
        assert chat.screen.query_one(TopBar).chat_title == "Private chat"
        await chat.until(lambda: [kept.summary.private for kept in client.chats.chats.values()] == [False])
        await chat.type("secret", enter=False)
        await chat.composer.save_draft()
        assert [text for text in client.chats.drafts.values() if text] == ["of before"]
        await chat.say(" words")
        assert [kept.summary.private for kept in client.chats.chats.values()] == [False, True]

    run(client, flow, private=True)


def test_private_chat_saves_no_draft() -> None:
    client = ScriptedClient()
    client.chats.drafts[None] = "of before"

    def in_the_history() -> list[str]:
        """Return the drafts of all chats that are not private."""
        private = {name for name, chat in client.chats.chats.items() if chat.summary.private}
        return [text for name, text in client.chats.drafts.items() if text and name not in private]

    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: chat.composer.area.text == "of before")
        await chat.conversation.open_new(private=True)
        assert chat.composer.area.text == ""
        await chat.type("secret", enter=False)
        await chat.composer.save_draft()
        assert in_the_history() == ["of before"]
        await chat.say(" words")
        assert in_the_history() == ["of before"]
        await chat.pilot.press("up")
        assert chat.composer.area.text == "secret words"
        await chat.pilot.press("end", *"!", "up")
        await chat.conversation.open_new()
        assert chat.composer.area.text == ""
        await chat.pilot.press("up")
        assert chat.composer.area.text == ""
        await chat.conversation.open_new(private=True)
        await chat.conversation.configure(chat.conversation.chat, ChatSettings("a secret"))
        await chat.type("not sent", enter=False)
        await chat.conversation.open_new()
        assert chat.conversation.chat.settings == ChatSettings()

    run(client, flow)
    assert in_the_history() == ["of before"]
    [draft] = [name for name, text in client.chats.drafts.items() if text == "not sent"]
    assert draft is not None
    assert client.chats.chats[draft].summary.private


def test_new_chat_is_empty_and_the_previous_draft_is_listed() -> None:
    client = ScriptedClient()

    async def flow(chat: Chatting) -> None:
        for text in ("half a", "another"):
            await chat.conversation.configure(chat.conversation.chat, ChatSettings("Be brief."))
            chat.at_once(*text, "f5")
            await chat.until(partial(operator.contains, client.chats.drafts.values(), text))
            await chat.until(lambda: chat.composer.area.text == "" and not chat.composer.is_leaving)
            assert chat.conversation.chat.id is None
            assert any("Draft saved to the chat list." in notice for notice in chat.notices())
        drafts = await client.chats.summaries()
        assert [(one.title, one.message_count) for one in drafts] == [("another", 0), ("half a", 0)]
        await chat.pilot.press("ctrl+n")
        assert len(await client.chats.summaries()) == 2
        await chat.conversation.open(drafts[1].id)
        assert chat.composer.area.text == "half a"
        assert chat.conversation.chat.settings.system == "Be brief."
        await chat.say(" sentence")
        assert chat.texts() == ["half a sentence", "Hello."]
        await chat.conversation.open(drafts[0].id)
        chat.composer.area.write("")
        await chat.conversation.open_new()
        assert [one.title for one in await client.chats.summaries()] == ["A title of the client"]

    run(client, flow)
    assert {text for text in client.chats.drafts.values() if text} == set()


def test_text_typed_while_a_chat_opens_belongs_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    client = ScriptedClient()
    name = client.keep("Kept", "a question", "an answer")
    client.chats.drafts[name] = "half a"
    opens, opening = asyncio.Event(), client.chats.open

    async def slow(chat: ChatId) -> Chat:
        await opens.wait()
        return await opening(chat)

    monkeypatch.setattr(client.chats, "open", slow)

    async def flow(chat: Chatting) -> None:
        await chat.pilot.press(*"before")
        chat.app.run_worker(chat.conversation.open(name))
        await chat.until(lambda: chat.composer.is_leaving)
        await chat.pilot.press(*" more")
        await asyncio.sleep(0.5)  # longer than the pause before a draft is saved
        opens.set()
        await chat.until(lambda: not chat.composer.is_leaving)
        assert chat.composer.area.text == "half a more"
        opens.clear()
        chat.app.run_worker(chat.conversation.open(ChatId("none")))
        await chat.until(lambda: chat.composer.is_leaving)
        await chat.pilot.press(*"!", "enter", *"then")
        opens.set()
        await chat.until(lambda: any("There is no chat none" in notice for notice in chat.notices()))
        assert chat.composer.area.text.split() == ["!", "half", "a", "morethen"]

    run(client, flow)
    assert "before" in client.chats.drafts.values()
    assert client.replies.asked == []


def test_message_sent_while_a_chat_opens_goes_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    client = ScriptedClient()
    name = client.keep("Kept", "a question", "an answer")
    opens, opening = asyncio.Event(), client.chats.open

    async def slow(chat: ChatId) -> Chat:
        await opens.wait()
        return await opening(chat)

    monkeypatch.setattr(client.chats, "open", slow)

    async def flow(chat: Chatting) -> None:
        chat.app.run_worker(chat.conversation.open(name))
        await chat.until(lambda: chat.composer.is_leaving)
        await chat.pilot.press(*"hello", "enter")
        opens.set()
        await chat.until(lambda: chat.texts() == ["a question", "an answer", "hello", "Hello."])

    run(client, flow)
    assert [*client.chats.chats] == [name]


def test_restored_draft_is_listed_if_the_user_typed_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    client = ScriptedClient()
    client.chats.drafts[None] = "of before"
    read = asyncio.Event()

    async def slow() -> list[str]:
        await read.wait()
        return []

    monkeypatch.setattr(client.chats, "inputs", slow)

    async def flow(chat: Chatting) -> None:
        await chat.pilot.press(*"now")
        read.set()
        await chat.until(lambda: client.chats.drafts[None] == "now")
        assert chat.composer.area.text == "now"
        assert [one.title for one in await client.chats.summaries()] == ["of before"]

    run(client, flow)


def test_cleared_prompt_is_restored_by_undo_or_up() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.pilot.press(*"one", "ctrl+j", *"two", "ctrl+l")
        assert chat.composer.area.text == ""
        await chat.pilot.press("ctrl+z")
        assert chat.composer.area.text == "one\ntwo"
        await chat.pilot.press("ctrl+l")
        await chat.say("three")
        await chat.pilot.press("up", "up")
        assert chat.composer.area.text == "one\ntwo"

    run(ScriptedClient(), flow)


def test_only_the_selection_is_cut() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.pilot.press(*"one", "ctrl+j", *"two", "ctrl+x")
        assert chat.composer.area.text == "one\ntwo"
        await chat.pilot.press("shift+home", "ctrl+x")
        assert (chat.composer.area.text, chat.app.clipboard) == ("one\n", "two")
        assert any(notice.startswith("Cut.") for notice in chat.notices())
        await chat.pilot.press("ctrl+z")
        assert chat.composer.area.text == "one\ntwo"

    run(ScriptedClient(), flow)


def test_text_typed_before_the_up_key_is_not_lost() -> None:
    client = ScriptedClient()

    async def flow(chat: Chatting) -> None:
        await chat.say("first")
        (name,) = client.chats.chats
        await chat.pilot.press(*"unfinished", "up")
        assert chat.composer.area.text == "first"
        await chat.composer.save_draft()
        assert client.chats.drafts[name] == "unfinished"
        await chat.pilot.press(*"!", "up", "down", "down")
        assert chat.composer.area.text == "unfinished"
        await chat.pilot.press("up")
        assert chat.composer.area.text == "first!"
        await chat.say("")
        assert chat.texts()[-2:] == ["first!", "Hello."]
        await chat.pilot.press("up", "up")
        assert chat.composer.area.text == "unfinished"

    run(client, flow)


def test_canceled_edit_is_recalled_by_the_up_key() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.say("one")
        await chat.pilot.press("ctrl+up")
        await chat.until(lambda: chat.composer.area.text == "one")
        await chat.pilot.press(*" and more", "escape")
        await chat.until(lambda: chat.composer.area.text == "")
        await chat.pilot.press("up")
        assert chat.composer.area.text == "one and more"

    run(ScriptedClient(), flow)


def test_rewriting_a_reply_keeps_the_draft() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.say("one")
        await chat.type("my draft", enter=False)
        chat.views()[1].focus()
        await chat.pilot.press("ctrl+up")
        await chat.until(lambda: chat.composer.area.text == "Hello.")
        await chat.type("!")
        await chat.until(lambda: chat.texts() == ["one", "Hello.!"])
        assert chat.composer.area.text == "my draft"
        assert chat.conversation.chat.path()[-1].role is Role.ASSISTANT

    run(ScriptedClient(), flow)
