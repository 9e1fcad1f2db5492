"""Tests for the settings dialog: its layout and focus, the selected preset, and the default settings of new chats."""

import pytest
from textual.widgets import Input, Select, TextArea

from tests.tui.pilots import Chatting, at_rest, run
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


async def open_settings(chat: Chatting) -> SettingsScreen:
    await chat.pilot.press("ctrl+s")
    await chat.until(lambda: isinstance(chat.app.screen, SettingsScreen) and chat.app.screen.is_mounted)
    await at_rest(chat.pilot, chat.lines)
    assert isinstance(chat.app.screen, SettingsScreen)
    return chat.app.screen


@pytest.mark.parametrize("size", [(120, 40), (80, 24), (60, 15)])
def test_settings_open_at_the_top_and_show_how_to_cancel(size: tuple[int, int]) -> None:
    async def flow(chat: Chatting) -> None:
        screen = await open_settings(chat)
        assert screen.query_one(".dialog").scroll_y == 0
        assert any("Preset" in line for line in chat.lines())
        assert any("esc cancel" in line for line in chat.lines())

    run(ScriptedClient(), flow, size=size)


def test_all_settings_are_visible_in_24_lines() -> None:
    async def flow(chat: Chatting) -> None:
        assert (await open_settings(chat)).query_one(".dialog").max_scroll_y == 0

    run(ScriptedClient(), flow, size=(80, 24))


def test_keys_after_tab_reach_the_next_field() -> None:
    async def flow(chat: Chatting) -> None:
        screen = await open_settings(chat)
        chat.at_once(*"hot", "tab", *"0.5", "shift+tab", *"ter")
        system = screen.query_one("#system", TextArea)
        await chat.until(lambda: system.text == "hotter")
        assert screen.query_one("#temperature", Input).value == "0.5"

    run(ScriptedClient(), flow)


def test_focused_field_differs_from_its_dialog() -> None:
    async def flow(chat: Chatting) -> None:
        screen = await open_settings(chat)
        await chat.pilot.press("tab")
        field = screen.query_one("#temperature")
        await chat.until(lambda: field.has_focus)
        inside, around = field.background_colors[1], screen.query_one(".dialog").background_colors[1]
        assert max(abs(one - other) for one, other in zip(inside.rgb, around.rgb, strict=True)) > 16

    run(ScriptedClient(), flow)
