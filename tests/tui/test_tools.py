"""Tests for the tools screen: servers, switches, permissions, and the example for a first mcp.json."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from textual.widgets import OptionList

from tests.tui.pilots import Chatting, run
from tests.tui.scripted_client import ScriptedClient
from tui.client import ClientError
from tui.screens.tools import EXAMPLE, ToolsScreen
from tui.types import ToolInfo, ToolServer

SERVERS = [
    ToolServer(
        "files",
        "ready",
        "",
        (ToolInfo("files__read", "Read a file.\nWhole.", True), ToolInfo("files__write", "[b]Write")),
    ),
    ToolServer("web", "failed", "The command was not found: npx."),
]


def client_with(servers: Sequence[ToolServer] = SERVERS) -> ScriptedClient:
    client = ScriptedClient()
    client.tools.listed = list(servers)
    return client


async def opened(chat: Chatting) -> ToolsScreen:
    await chat.type("/tools")
    await chat.until(lambda: isinstance(chat.app.screen, ToolsScreen) and chat.label("#summary") != "")
    screen = chat.app.screen
    assert isinstance(screen, ToolsScreen)
    await chat.until(lambda: screen._servers is not None)
    await chat.pilot.pause()
    return screen


def test_servers_and_tools_are_listed() -> None:
    async def flow(chat: Chatting) -> None:
        screen = await opened(chat)
        assert chat.label("#summary") == "2 of 2 tools active in this chat"
        lines = [str(option.prompt) for option in screen.query_one(OptionList).options]
        assert lines == [
            "files  ready",
            "  [x] read  always allowed",
            "  [x] write",
            "web  failed: The command was not found: npx.",
        ]
        await chat.pilot.press("down")
        assert chat.label("#about") == "Read a file. Whole."
        assert "/home/me/.config/inglenook/mcp.json" in chat.label("#help")

    run(client_with(), flow)


def test_failed_server_is_reported_once() -> None:
    async def flow(chat: Chatting) -> None:
        text = "The tool server web failed. The command was not found: npx. /tools restarts it."
        await chat.until(lambda: text in chat.notices())
        await opened(chat)
        chat.app.clear_notifications()
        await chat.pilot.press("escape")
        await chat.until(lambda: not isinstance(chat.app.screen, ToolsScreen))
        await chat.pilot.pause()
        assert text not in chat.notices()

    run(client_with(), flow)


def test_tools_that_are_left_out_are_counted() -> None:
    async def flow(chat: Chatting) -> None:
        screen = await opened(chat)
        [line] = [str(option.prompt) for option in screen.query_one(OptionList).options]
        assert line == "big  ready  7 left out"
        assert chat.label("#about").startswith("7 tools are left out")

    run(client_with([ToolServer("big", "ready", left_out=7)]), flow)


def test_tool_is_switched_off_and_on_for_the_chat() -> None:
    client = client_with()

    async def flow(chat: Chatting) -> None:
        await chat.say("Hi")
        await opened(chat)
        await chat.pilot.press("down", "down", "space")
        assert chat.label("#summary") == "1 of 2 tools active in this chat"
        [stored] = client.chats.chats.values()
        assert stored.settings.disabled_tools == {"files__write"}
        await chat.pilot.press("enter", "a")
        assert chat.label("#summary") == "0 of 2 tools active in this chat"
        await chat.pilot.press("a", "escape")
        await chat.until(lambda: chat.app.screen is chat.screen)
        assert chat.conversation.chat.settings.disabled_tools == frozenset()

    run(client, flow)


def test_failed_server_is_restarted_and_permission_revoked() -> None:
    client = client_with()

    async def flow(chat: Chatting) -> None:
        await opened(chat)
        await chat.pilot.press("r", "v")  # the server is ready, so these keys do nothing
        await chat.pilot.press("down", "v", "down", "down", "r")
        await chat.until(lambda: client.tools.restarted == ["web"])
        assert client.tools.revoked == ["files__read"]

    run(client, flow)


def test_list_follows_the_state_of_a_starting_server() -> None:
    client = client_with([ToolServer("files", "starting")])

    async def flow(chat: Chatting) -> None:
        await opened(chat)
        client.tools.listed = SERVERS
        await chat.until(lambda: chat.label("#summary") == "2 of 2 tools active in this chat")

    run(client, flow)


def test_example_can_be_copied_if_there_are_no_servers() -> None:
    async def flow(chat: Chatting) -> None:
        await opened(chat)
        assert chat.label("#summary") == "No tools"
        assert EXAMPLE in chat.label("#help")
        assert "pip install 'inglenook[mcp]'" in chat.label("#help")
        await chat.pilot.press("c", "space", "r", "v", "a")
        assert chat.app.clipboard == EXAMPLE

    run(client_with([]), flow)


def test_help_without_servers_scrolls_in_a_low_terminal() -> None:
    async def flow(chat: Chatting) -> None:
        await opened(chat)
        assert not any("pip install" in line for line in chat.lines())
        await chat.pilot.press("end")
        await chat.until(lambda: any("pip install" in line for line in chat.lines()))

    run(client_with([]), flow, size=(60, 15))


def test_line_after_the_path_of_the_file_does_not_start_with_a_comma(monkeypatch: pytest.MonkeyPatch) -> None:
    client, path = client_with([]), Path("/mcp.json")
    monkeypatch.setattr(client.tools, "config_paths", lambda: [path])

    async def flow(chat: Chatting) -> None:
        nonlocal path
        screen = await opened(chat)
        path = Path(f"/{'x' * (screen.query_one('#help').content_size.width - 1)}")  # fills a line
        await screen.load().wait()
        await chat.until(lambda: any(str(path) in line for line in chat.lines()))
        assert not any(line[3:57].strip("│ ").startswith(",") for line in chat.lines())

    run(client, flow, size=(60, 15))


def test_path_of_the_file_is_whole_in_a_low_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    client = client_with()
    path = "/home/someone-with-a-long-name/.config/inglenook/folders/mcp.json"
    monkeypatch.setattr(client.tools, "config_paths", lambda: [Path(path)])

    async def flow(chat: Chatting) -> None:
        await opened(chat)
        # without the edges of a line, which are part of the chat
        await chat.until(lambda: path in "".join(line[3:57].strip("│ ") for line in chat.lines()))

    run(client, flow, size=(60, 15))


def test_invalid_file_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    client = client_with()

    async def fail() -> Sequence[ToolServer]:
        raise ClientError("mcp.json is not valid", "Correct the file.")

    monkeypatch.setattr(client.tools, "servers", fail)

    async def flow(chat: Chatting) -> None:
        await opened(chat)
        assert "mcp.json is not valid. Correct the file." in chat.label("#help")

    run(client, flow)


def test_palette_shows_the_number_of_active_tools() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.until(lambda: chat.screen.dialogs.active_tools)
        await chat.pilot.press("ctrl+backslash", *"tools")
        await chat.until(lambda: "/tools 2 of 2 tools active in this chat" in " ".join("".join(chat.lines()).split()))

    run(client_with(), flow)


@pytest.mark.parametrize("size", [(60, 15), (80, 24), (120, 40)])
def test_tools_dialog_fits_the_terminal(size: tuple[int, int]) -> None:
    many = ToolServer("many", "ready", "", tuple(ToolInfo(f"many__tool_{n}", "d" * 500) for n in range(60)))

    async def flow(chat: Chatting) -> None:
        await opened(chat)
        await chat.pilot.press("down", "end")
        await chat.pilot.pause()
        text = "\n".join(chat.lines())
        assert "60 of 60 tools active" in text
        assert "tool_59" in text
        assert "mcp.json" in text
        assert "ddd" in text

    run(client_with([many]), flow, size=size)
