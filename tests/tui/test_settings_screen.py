"""Tests for the settings dialog: its layout and focus, the selected preset, and the default settings of new chats."""

import re

import pytest
from textual.containers import VerticalGroup
from textual.widgets import Input, Label, Select, TextArea

from tests.tui.pilots import Chatting, at_rest, run
from tests.tui.scripted_client import ScriptedClient
from tui.client import ClientError
from tui.screens.chat import ChatScreen
from tui.screens.dialog import Confirm
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
        status = chat.composer.status
        await chat.until(lambda: status.settings == PIRATE)
        for private in (False, True, True, False):
            await chat.conversation.configure(chat.conversation.chat, ChatSettings("Only here."))
            await chat.conversation.open_new(private=private)
            assert (chat.conversation.chat.settings, status.settings) == (PIRATE, PIRATE)

    run(client, flow)


async def open_settings(chat: Chatting) -> SettingsScreen:
    await chat.pilot.press("ctrl+s")
    await chat.until(lambda: isinstance(chat.app.screen, SettingsScreen) and chat.app.screen.is_mounted)
    await at_rest(chat.pilot, chat.lines)
    assert isinstance(chat.app.screen, SettingsScreen)
    return chat.app.screen


@pytest.mark.share(1)
@pytest.mark.parametrize("size", [(120, 40), (80, 24), (60, 15)])
def test_settings_open_at_the_top_and_show_how_to_cancel(size: tuple[int, int]) -> None:
    async def flow(chat: Chatting) -> None:
        screen = await open_settings(chat)
        assert screen.query_one(".dialog").scroll_y == 0
        assert any("Preset" in line for line in chat.lines())
        assert any(re.search(r"esc( cancel)? · \^s apply", line) for line in chat.lines())

    run(ScriptedClient(), flow, size=size)


def test_all_settings_are_visible_in_24_lines() -> None:
    async def flow(chat: Chatting) -> None:
        assert (await open_settings(chat)).query_one(".dialog").max_scroll_y == 0

    run(ScriptedClient(), flow, size=(80, 24))


def test_each_invalid_value_is_reported() -> None:
    async def flow(chat: Chatting) -> None:
        screen = await open_settings(chat)
        for name, text in (("top_p", "2"), ("seed", "x"), ("max_tokens", "0")):
            screen.query_one(f"#{name}", Input).value = text
        await chat.pilot.press("ctrl+s")
        await chat.until(lambda: getattr(chat.app.focused, "id", "") == "top_p")
        shown = [str(label.render()) for label in screen.query(".problem").results(Label) if label.display]
        assert shown == [
            "✗ Top p must be between 0 and 1.\n✗ Seed must be a whole number.",
            "✗ Max tokens must be between 1 and 1e+06.",
        ]

    run(ScriptedClient(), flow)


def test_escape_asks_before_it_discards_changes() -> None:
    async def flow(chat: Chatting) -> None:
        screen = await open_settings(chat)
        await chat.pilot.press(*"Be kind.", "escape")
        await chat.until(lambda: isinstance(chat.app.screen, Confirm))
        await chat.pilot.press("enter")
        await chat.until(lambda: chat.app.screen is screen)
        assert screen.query_one("#system", TextArea).text == "Be kind."
        await chat.pilot.press("escape")
        await chat.until(lambda: isinstance(chat.app.screen, Confirm))
        await chat.pilot.press("tab", "enter")
        await chat.until(lambda: isinstance(chat.app.screen, ChatScreen))
        assert chat.conversation.chat.settings == ChatSettings()
        await open_settings(chat)
        await chat.pilot.press("escape")
        await chat.until(lambda: isinstance(chat.app.screen, ChatScreen))

    run(ScriptedClient(), flow)


@pytest.mark.parametrize("width", [120, 60])
def test_status_line_and_preset_command_name_the_preset_in_use(width: int) -> None:
    client = ScriptedClient()
    client.chats.kept_presets["pirate"] = Preset("pirate", PIRATE)

    async def flow(chat: Chatting) -> None:
        await chat.type("/preset PIRATE")
        await chat.until(lambda: "   preset pirate   " in str(chat.composer.status.render()))
        assert chat.notices() == ["Preset: pirate"]
        await chat.type("/preset")
        await chat.until(lambda: chat.notices()[-1:] == ["In use: pirate. Presets: pirate"])
        await chat.type("/set temperature 0.3")
        await chat.until(lambda: "temp 0.3   system prompt" in str(chat.composer.status.render()))

    run(client, flow, size=(width, 24))


def test_keys_after_tab_reach_the_next_field() -> None:
    async def flow(chat: Chatting) -> None:
        screen = await open_settings(chat)
        chat.at_once(*"hot", "tab", *"0.5", "shift+tab", *"ter")
        system = screen.query_one("#system", TextArea)
        await chat.until(lambda: system.text == "hotter")
        assert screen.query_one("#temperature", Input).value == "0.5"

    run(ScriptedClient(), flow)


def test_settings_have_titled_groups() -> None:
    async def flow(chat: Chatting) -> None:
        screen = await open_settings(chat)
        titles = [str(group.border_title).strip() for group in screen.query(VerticalGroup)]
        assert titles == ["Preset and system prompt", "Sampling", "Reply and reasoning", "Context"]
        assert all(any(title in line for line in chat.lines()) for title in titles)

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


def test_empty_fields_show_the_values_in_force() -> None:
    client = ScriptedClient()
    client.engine.sampling = Sampling(temperature=0.6, top_k=20, repetition_penalty=1.1)

    async def flow(chat: Chatting) -> None:
        fields = (await open_settings(chat)).query(Input)
        assert {field.id: field.placeholder for field in fields} == {
            "temperature": "0.6 (model)",
            "top_p": "1.0 (default)",
            "top_k": "20 (model)",
            "min_p": "0 (default)",
            "repetition_penalty": "1.1 (model)",
            "seed": "random (default)",
            "max_tokens": "no limit (default)",
        }
        assert any("20 (model)" in line and "0 (default)" in line for line in chat.lines())

    run(client, flow, size=(60, 24))


@pytest.mark.parametrize(("columns", "keys"), [(80, "F8 delete it"), (60, "F8 delete"), (40, "^s apply")])
def test_keys_fit_the_frame(columns: int, keys: str) -> None:
    async def flow(chat: Chatting) -> None:
        await open_settings(chat)
        await chat.until(lambda: any(f"{keys} ─" in line for line in chat.lines()))

    run(ScriptedClient(), flow, size=(columns, 15))


def test_error_is_in_the_group_of_its_field() -> None:
    async def flow(chat: Chatting) -> None:
        screen = await open_settings(chat)
        screen.query_one("#max_tokens", Input).value = "0"
        await chat.pilot.press("ctrl+s")
        problem = screen.query_one("#max_tokens").query_ancestor(VerticalGroup).query_one(".problem")
        await chat.until(lambda: problem.display and screen.query_one("#max_tokens").has_focus)
        assert [one for one in screen.query(".problem") if one.display] == [problem]
        await chat.pilot.press("backspace")
        await chat.until(lambda: not problem.display)

    run(ScriptedClient(), flow)


@pytest.mark.parametrize(
    "problem", [None, pytest.param(ClientError("no memory"), id="the previous model is loaded again")]
)
def test_values_in_force_appear_when_the_model_is_loaded(problem: ClientError | None) -> None:
    client = ScriptedClient()
    client.engine.problem = problem

    async def flow(chat: Chatting) -> None:
        screen = await open_settings(chat)
        assert {field.placeholder for field in screen.query(Input)} == {"model default"}
        screen.query_one("#temperature", Input).value = "0.3"
        client.engine.loads.set()
        await chat.until(lambda: screen.query_one("#top_p", Input).placeholder == "0.95 (model)")
        assert screen.query_one("#temperature", Input).value == "0.3"

    run(client, flow, loaded=False)
