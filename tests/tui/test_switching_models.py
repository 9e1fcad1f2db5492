"""Tests for loading another model while replies are running."""

import pytest

from tests.tui.pilots import Chatting, run
from tests.tui.scripted_client import WAIT, Script, ScriptedClient
from tui.engine_types import ModelInfo
from tui.screens.dialog import Confirm
from tui.types import TextDelta

OTHER = ModelInfo("qwen3:1b", "Q8_0", 1_000_000, installed=True)
SCRIPT: Script = [TextDelta("begun"), WAIT]


async def asked_twice(chat: Chatting) -> None:
    """Start replies in two chats, open a new one, and load a model there."""
    for text in ("one", "two"):
        await chat.conversation.open_new()
        await chat.type(text)
        await chat.until(lambda: len(chat.views()) == 2)
        assert chat.conversation.chat.id is not None
        await chat.client.chats.rename(chat.conversation.chat.id, f"Chat {text}")
    await chat.conversation.open_new()
    await chat.type("/load qwen3:1b")
    await chat.until(lambda: isinstance(chat.app.screen, Confirm) and chat.label(".about"))


@pytest.mark.parametrize(
    ("keys", "loads", "stops"),
    [(["right", "enter"], True, True), (["enter"], True, False), (["escape"], False, False)],
)
def test_load_offers_to_stop_running_replies(keys: list[str], loads: bool, stops: bool) -> None:
    client = ScriptedClient(SCRIPT)
    client.models.others = (OTHER,)

    async def flow(chat: Chatting) -> None:
        await asked_twice(chat)
        assert chat.label(".question") == "2 replies are running. Stop them and load qwen3:1b?"
        assert chat.label(".about").startswith("Chat one, Chat two")
        await chat.pilot.press(*keys)
        await chat.until(lambda: chat.app.screen is chat.screen)
        if loads:
            await chat.until(lambda: client.models.loaded == ["qwen3:1b"])
        if stops:
            await chat.until(lambda: not chat.conversation.running_chats)
        await chat.pilot.pause(0.1)
        assert bool(client.models.loaded) is loads
        assert len(client.replies.stopped) == 2 * stops
        assert len(chat.conversation.running_chats) == 2 * (not stops)

    run(client, flow)


def test_load_beside_running_replies_does_not_ask() -> None:
    client = ScriptedClient(SCRIPT)
    client.models.others, client.models.waits = (OTHER,), False

    async def flow(chat: Chatting) -> None:
        await chat.type("one")
        await chat.until(lambda: len(chat.views()) == 2)
        await chat.type("/load qwen3:1b")
        await chat.until(lambda: client.models.loaded == ["qwen3:1b"])
        assert len(chat.conversation.running_chats) == 1

    run(client, flow)


def test_load_without_running_replies_does_not_ask() -> None:
    client = ScriptedClient()
    client.models.others = (OTHER,)

    async def flow(chat: Chatting) -> None:
        await chat.say("one")
        await chat.type("/load qwen3:1b")
        await chat.until(lambda: client.models.loaded == ["qwen3:1b"])

    run(client, flow)


def test_escape_does_not_stop_the_reply_of_another_chat() -> None:
    client = ScriptedClient(SCRIPT)

    async def flow(chat: Chatting) -> None:
        await chat.type("one")
        await chat.until(lambda: len(chat.views()) == 2)
        await chat.conversation.open_new()
        await chat.pilot.press("escape", "escape", "ctrl+c")
        assert client.replies.stopped == []
        assert len(chat.conversation.running_chats) == 1

    run(client, flow)
