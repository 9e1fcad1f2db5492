"""Settings of the open chat: the dialog, and the commands that change a single one."""

from dataclasses import replace

from textual.dom import DOMNode

from tui import sampling_fields
from tui.client import Client
from tui.footer_keys import key_name
from tui.open_chat import find_preset, name_preset
from tui.plain_text import single_line
from tui.show_errors import show_errors
from tui.types import NO_PRESET, ToolServer
from tui.widgets.conversation import Conversation


async def edit(conversation: Conversation, client: Client) -> None:
    """Let the user edit all settings in a dialog."""
    from tui.screens.settings import SettingsScreen

    chat = conversation.chat
    settings = await conversation.app.push_screen_wait(SettingsScreen(client, chat.settings))
    if settings is not None:
        await conversation.configure(chat, settings)


async def choose_tools(conversation: Conversation, client: Client) -> None:
    """Let the user switch tools on and off in a dialog."""
    from tui.screens.tools import ToolsScreen

    chat = conversation.chat

    async def configure(disabled: frozenset[str]) -> None:
        await conversation.configure(chat, replace(chat.settings, disabled_tools=disabled))

    await conversation.app.push_screen_wait(ToolsScreen(client.tools, chat.settings.disabled_tools, configure))


def report_failed_tools(node: DOMNode, server: ToolServer) -> None:
    """Notify the user that a tool server has failed."""
    node.app.notify(
        f"{server.reason} /tools restarts it.",
        title=f"The tool server {server.name} failed.",
        severity="warning",
        markup=False,
    )


async def set_system_prompt(conversation: Conversation, client: Client, text: str) -> None:
    """Set the system prompt. Without a text, let the user edit all settings instead."""
    chat = conversation.chat
    if text:
        await conversation.configure(chat, replace(chat.settings, system=text))
    else:
        await edit(conversation, client)


async def set_parameter(conversation: Conversation, text: str) -> None:
    """Set one sampling parameter. `text` is a name and a value: "temperature 0.2". If it is wrong, it can be edited."""
    chat = conversation.chat
    name, _, value = text.partition(" ")
    try:
        sampling = sampling_fields.change(chat.settings.sampling, name, value)
    except sampling_fields.InvalidField as error:
        conversation.app.notify(str(error), severity="warning", markup=False)
        if text:
            conversation.composer.put_back(f"/set {text}")
        return
    await conversation.configure(chat, replace(chat.settings, sampling=sampling))
    conversation.app.notify(sampling_fields.confirm(sampling, name), markup=False)


async def use_preset(conversation: Conversation, client: Client, name: str) -> None:
    """Use the settings of a preset, or list the presets if there is none of this name."""
    chat = conversation.chat
    with show_errors(conversation):
        presets = await client.chats.presets()
        settings = find_preset(presets, name)
        if settings is not None:
            await conversation.configure(chat, settings)
            used = single_line(name_preset(presets, settings) or NO_PRESET)
            conversation.app.notify(f"Preset: {used}", markup=False)
            return
        names = ", ".join(single_line(one.name) for one in presets)
        used = name_preset(presets, chat.settings)
        before = f"No preset {single_line(name)}. " if name else f"In use: {single_line(used)}. " if used else ""
        words = (
            f"{before}Presets: {names}"
            if names
            else f"No presets yet ({key_name('ctrl+s')}, then {key_name('f5')} saves one)."
        )
        conversation.app.notify(words, markup=False)
        if name:
            conversation.composer.put_back(f"/preset {name}")
