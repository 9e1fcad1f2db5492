"""Tests that typed letters reach the prompt wherever the focus is, and never change the list of chats."""

import random
from collections import Counter
from functools import partial

import pytest
from textual import events
from textual.widgets import OptionList

from tests.tui.pilots import Chatting, at_rest, run
from tests.tui.scripted_client import WAIT, ScriptedClient
from tui.screens.chat import ChatScreen
from tui.screens.dialog import Ask, Confirm
from tui.types import ChatId, Role, TextDelta
from tui.widgets.chat_list import ChatList
from tui.widgets.message_view import MessageView

WIDE, NARROW = (120, 40), (80, 24)
SENTENCES = (
    "please add a dad to the archive and delete every view of it",
    "really? can you describe the trade, or keep up the vivid prose",
    "under a red door the cat pads over and dozes",
    "just to be kind, reply quickly; undo all of that",
)
AROUND = ("tab", "shift+tab", "escape", "tab", "shift+tab", "enter", "up", "down")


def history() -> tuple[ScriptedClient, list[ChatId]]:
    client = ScriptedClient()
    return client, [client.keep(f"Chat {number}", "a question", "an answer") for number in range(3)]


def options(chat: Chatting) -> OptionList:
    return chat.screen.query_one(ChatList).query_one(OptionList)


def listed_chats(chat: Chatting) -> int:
    """Return the number of chats in the list, without group headings."""
    return sum(option.id is not None for option in options(chat).options)


def has_chats(chat: Chatting, count: int) -> bool:
    return listed_chats(chat) == count


@pytest.mark.share(1)
@pytest.mark.parametrize("size", [WIDE, NARROW])
def test_typing_with_focus_keys_loses_no_chat_and_no_letter(size: tuple[int, int]) -> None:
    client, kept = history()
    titles = {name: client.chats.chats[name].summary.title for name in kept}
    typed: list[str] = []
    found: list[str] = []

    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: listed_chats(chat) == 3)
        await chat.conversation.open(kept[0])
        for _ in range(15):
            words = random.choice(SENTENCES).split(" ")
            start = random.randrange(len(words))
            keys = [*" ".join(words[start : start + random.randrange(1, 4)])]
            typed.extend(keys)
            chat.at_once(*keys, *random.choices(AROUND, k=random.randrange(1, 4)))
            await chat.pilot.pause()
            assert isinstance(chat.app.screen, ChatScreen)
        await chat.until(lambda: not chat.conversation.outbox.is_busy)
        await at_rest(chat.pilot, lambda: (chat.composer.area.text, chat.texts()))
        await chat.composer.save_draft()
        area = chat.composer.area
        found.extend([*area._history.entries, *area._history.unsent])  # earlier inputs, which the arrow keys recall

    run(client, flow, size=size)
    chats = client.chats.chats
    assert client.chats.deleted == {}
    assert {name: chats[name].summary.title for name in kept} == titles
    assert not any(chat.summary.archived or chat.summary.pinned for chat in chats.values())
    sent = [one.text for chat in chats.values() for one in chat.messages if one.role is Role.USER]
    written = Counter("".join([*sent, *found, *client.chats.drafts.values()]))
    written -= Counter("a question" * 3)
    # <= because arrow keys may recall a message, which is then sent twice
    assert Counter("".join(typed).replace(" ", "")) <= written


def test_tab_stays_in_a_prompt_with_text() -> None:
    client, (name, *_) = history()

    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: len(chat.views()) == 2)
        await chat.pilot.press(*"please", "tab", *"add", "space", *"a", "space", *"dad")
        assert chat.app.focused is chat.composer.area
        assert chat.composer.area.text == "pleaseadd a dad"
        await chat.pilot.press("home", "tab")
        assert chat.composer.area.text == "    pleaseadd a dad"
        await chat.pilot.press("end", "ctrl+j", "tab", "x", "tab")
        assert chat.composer.area.text == "    pleaseadd a dad\n    x"

    run(client, flow, size=WIDE, chat=name)
    assert len(client.chats.chats) == 3


def test_tab_completes_the_best_match() -> None:
    async def flow(chat: Chatting) -> None:
        for typed, completed in (
            ("/arc", "/archive"),
            ("/archived", "/archived"),
            ("/sett", "/settings"),
            ("/att", "/attach "),
            ("/model", "/load "),
            ("/title x", "/title x"),
            ("/nonsense", "/nonsense"),
        ):
            chat.composer.area.write(typed)
            await chat.pilot.pause()
            await chat.pilot.press("tab")
            assert chat.composer.area.text == completed
            assert chat.app.focused is chat.composer.area

    run(ScriptedClient(), flow)


@pytest.mark.parametrize("size", [WIDE, NARROW])
def test_letters_in_the_chat_list_go_to_the_prompt(size: tuple[int, int]) -> None:
    client, kept = history()

    async def flow(chat: Chatting) -> None:
        if size is NARROW:
            await chat.pilot.press("ctrl+b")
        else:
            await chat.pilot.press("tab")
        await chat.until(lambda: options(chat).has_focus)
        chat.at_once(*"padvur", "enter")
        await chat.until(lambda: chat.texts() == ["padvur", "Hello."])
        assert chat.app.focused is chat.composer.area
        assert chat.conversation.display

    run(client, flow, size=size)
    assert [*client.chats.chats][:3] == kept


def test_letters_without_a_text_field_go_to_the_prompt() -> None:
    client, (name, *_) = history()

    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: len(chat.views()) == 2)
        await chat.pilot.press("shift+tab")
        assert isinstance(chat.app.focused, MessageView)
        chat.at_once(*"ercotjk")
        await chat.until(lambda: chat.composer.area.text == "ercotjk")
        chat.screen.set_focus(None)
        await chat.pilot.press("x")
        assert chat.composer.area.text == "ercotjkx"
        await chat.pilot.click(MessageView)
        assert isinstance(chat.app.focused, MessageView)
        chat.app.post_message(events.Paste(" pasted"))
        await chat.until(lambda: chat.composer.area.text == "ercotjkx pasted")
        assert client.replies.asked == []

    run(client, flow, chat=name)


def test_message_keys_apply_to_the_focused_message() -> None:
    client = ScriptedClient()
    name = client.keep("Kept", "first", "one", "second", "two")

    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: len(chat.views()) == 4)
        chat.views()[0].focus()
        await chat.pilot.press("ctrl+up")
        await chat.until(lambda: chat.composer.area.text == "first")
        await chat.pilot.press("escape")
        chat.views()[1].focus()
        await chat.pilot.press("ctrl+y")
        await chat.until(lambda: chat.texts() == ["first", "Hello."])
        chat.views()[0].focus()
        await chat.pilot.press("ctrl+c")
        await chat.until(lambda: chat.app.clipboard == "first")

    run(client, flow, chat=name)


def test_escape_returns_from_the_list_without_stopping_the_reply() -> None:
    client = ScriptedClient([TextDelta("begun"), WAIT])

    async def flow(chat: Chatting) -> None:
        await chat.type("go")
        await chat.until(lambda: len(chat.views()) == 2)
        await chat.pilot.press("ctrl+b")
        await chat.until(lambda: options(chat).has_focus)
        await chat.pilot.press("escape")
        assert chat.app.focused is chat.composer.area
        assert chat.conversation.display
        assert chat.conversation.current_reply is not None

    run(client, flow)
    assert client.replies.stopped == []


@pytest.mark.share(1)
@pytest.mark.parametrize("pressed", ["delete", "ctrl+d"])
def test_deleting_from_the_list_asks_and_can_be_undone(pressed: str) -> None:
    client, kept = history()

    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: listed_chats(chat) == 3)
        options(chat).focus()
        await chat.pilot.press(pressed)
        await chat.until(lambda: isinstance(chat.app.screen, Confirm) and chat.label(".about"))
        assert chat.label(".about").startswith("Chat 2")
        await chat.pilot.press("enter")  # presses the button that has the focus, which cancels
        assert client.chats.deleted == {}
        for left in (2, 1):
            await chat.until(lambda: isinstance(chat.app.screen, ChatScreen))
            await chat.pilot.press(pressed)
            await chat.until(lambda: isinstance(chat.app.screen, Confirm))
            await chat.pilot.press("tab", "enter")
            await chat.until(partial(has_chats, chat, left))
        await chat.pilot.press("ctrl+z")
        await chat.until(lambda: listed_chats(chat) == 2)
        await chat.type("/undo")
        await chat.until(lambda: listed_chats(chat) == 3)
        assert client.chats.deleted == {}

    run(client, flow, size=WIDE)
    assert {*client.chats.chats} == {*kept}


def test_chat_is_renamed_pinned_and_archived_from_the_list() -> None:
    client, kept = history()

    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: listed_chats(chat) == 3)
        options(chat).focus()
        await chat.pilot.press("ctrl+k")
        await chat.until(lambda: client.chats.chats[kept[2]].summary.pinned)
        await chat.pilot.press("ctrl+e")
        await chat.until(lambda: isinstance(chat.app.screen, Ask))
        await chat.pilot.press("end", *"!!", "enter")
        await chat.until(lambda: client.chats.chats[kept[2]].summary.title == "Chat 2!!")
        await chat.pilot.press("ctrl+a")
        await chat.until(lambda: listed_chats(chat) == 2)
        await chat.pilot.press("right")
        await chat.until(lambda: listed_chats(chat) == 1)
        await chat.pilot.press("left")
        await chat.until(lambda: listed_chats(chat) == 2)

    run(client, flow, size=WIDE)
