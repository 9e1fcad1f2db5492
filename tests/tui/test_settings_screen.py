"""Tests for the settings dialog: the selected preset, and the default settings of new chats."""

from textual.widgets import Select

from tests.tui.pilots import Chatting, run
from tests.tui.scripted_client import ScriptedClient
from tui.screens.settings import SettingsScreen
from tui.types import DEFAULT_PRESET, ChatSettings, Preset, Sampling

PIRATE = ChatSettings("Talk like a pirate.", Sampling(temperature=0.2))


def preset(chat: Chatting) -> object:
    return chat.app.screen.query_one("#preset", Select).value


def test_preset_of_the_chat_is_selected() -> None:
    client = ScriptedClient()
    client.chats.kept_presets["pirate"] = Preset("pirate", PIRATE)

    async def flow(chat: Chatting) -> None:
        await chat.conversation.configure(chat.conversation.chat, PIRATE)
        await chat.pilot.press("ctrl+s")
        await chat.until(lambda: isinstance(chat.app.screen, SettingsScreen) and preset(chat) == "pirate")

    run(client, flow)


def test_saved_preset_is_selected_and_can_be_the_default() -> None:
    client = ScriptedClient()

    async def flow(chat: Chatting) -> None:
        await chat.pilot.press("ctrl+s")
        await chat.until(lambda: isinstance(chat.app.screen, SettingsScreen) and chat.app.screen.is_mounted)
        await chat.pilot.press(*"short", "ctrl+d")
        await chat.until(lambda: preset(chat) == DEFAULT_PRESET)
        assert client.chats.kept_presets[DEFAULT_PRESET].settings.system == "short"

    run(client, flow)


def test_new_chat_starts_with_the_default_settings() -> None:
    client = ScriptedClient()
    client.chats.kept_presets[DEFAULT_PRESET] = Preset(DEFAULT_PRESET, PIRATE)

    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: chat.conversation.chat.settings == PIRATE)

    run(client, flow)
