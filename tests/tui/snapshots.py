"""Takes snapshots of every screen, in small and large terminals, dark and light.

`python -m tests.tui.snapshots` writes them to snapshots/*.svg. Look at them before you commit them.
"""

import asyncio
import os
import re
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from textual.screen import Screen
from textual.widgets import Input, TextArea

from tests.tui.look import REPLY
from tests.tui.pilots import Chatting
from tests.tui.scripted_client import ScriptedClient
from tui.app import ChatApp
from tui.engine_types import Loading, Recommendation
from tui.screens.branches import BranchesScreen
from tui.screens.dialog import Confirm
from tui.screens.engine import EngineScreen
from tui.screens.extracts import ExtractsScreen
from tui.screens.full_context import FullContextScreen
from tui.screens.help import HelpScreen
from tui.screens.models import ModelsScreen
from tui.screens.settings import SettingsScreen
from tui.screens.tools import ToolsScreen
from tui.types import ChatId, MessageId, ToolInfo, ToolServer
from tui.widgets.listing import Listing
from tui.widgets.status_line import StatusLine

FOLDER = Path(__file__).parent / "snapshots"
LOOKS = {
    "80x24-dark": ((80, 24), "hearth-dark"),
    "80x24-light": ((80, 24), "hearth-light"),
    "80x24-ansi": ((80, 24), "ansi-dark"),  # sixteen colors
    "160x48-dark": ((160, 48), "hearth-dark"),
    "160x48-light": ((160, 48), "hearth-light"),
}

Step = Callable[[Chatting], Awaitable[None]]


def scene() -> tuple[ScriptedClient, ChatId]:
    """Return a client with several chats, one of which has branches, reasoning, and a cache miss."""
    client = ScriptedClient()
    client.keep("Seats in a [b]hearth[/b]", "pinned", "yes", pinned=True)
    client.keep("Something older", "question", "answer")
    name = client.keep(
        "What an inglenook is", "What is an inglenook?", "A seat by the fire.", "Show me Markdown.", REPLY
    )
    chat = client.chats.chats[name]
    *others, last = chat.messages
    assert last.usage is not None
    usage = replace(last.usage, miss="the system prompt was changed at token 12: 'today' became 'tomorrow'")
    last = replace(last, reasoning="They want Markdown.", reasoning_seconds=0.73, usage=usage)
    beside = replace(others[1], id=MessageId("beside"), text="A corner near the chimney.")
    client.chats.chats[name] = replace(chat, messages=(*others, last, beside), leaf=last.id)
    client.engine.loads.set()
    return client, name


async def nothing(_: Chatting) -> None:
    pass


def opened(screen: type[Screen[Any]], *keys: str) -> Step:
    """Return a step that opens a screen with the first key, and then presses the other keys."""

    async def step(chat: Chatting) -> None:
        await chat.pilot.press(keys[0])
        await chat.until(lambda: isinstance(chat.app.screen, screen) and chat.app.screen.is_mounted)
        await chat.pilot.press(*keys[1:])

    return step


async def narrow_list(chat: Chatting) -> None:
    await chat.pilot.press("ctrl+b")


async def catalog(chat: Chatting) -> None:
    await opened(ModelsScreen, "f2")(chat)
    await chat.until(lambda: chat.app.screen.query_one(Listing).row_count)
    await chat.pilot.press("down")
    await chat.until(lambda: chat.label("#fit").startswith("qwen3:4b: ~4.6 tok/s · fits"))


async def taken_out(chat: Chatting) -> None:
    chat.views()[-1].focus()
    await chat.pilot.press("enter")
    await chat.until(lambda: isinstance(chat.app.screen, ExtractsScreen))


async def typed_command(chat: Chatting) -> None:
    await chat.type("/se", enter=False)


async def searched(chat: Chatting) -> None:
    await chat.type("/search fire")
    await chat.until(lambda: chat.app.screen.query("#found") and chat.label("#found") == "1 result in 1 chat")


async def full_context(chat: Chatting) -> None:
    await chat.type("/room")
    await chat.until(lambda: isinstance(chat.app.screen, FullContextScreen) and chat.label("#goes") != "")


async def asked_to_open(chat: Chatting) -> None:
    chat.screen.open_address("https://example.org/a?b=c")
    await chat.until(lambda: isinstance(chat.app.screen, Confirm))


async def welcome(chat: Chatting) -> None:
    await chat.pilot.press("ctrl+n")
    await chat.until(lambda: chat.conversation.welcome.display)
    chat.conversation.welcome.recommend(Recommendation("qwen3:4b", "fits: 32k context; needs 3.2 GB, 8.0 GB free"))
    chat.conversation.welcome.show_loading(Loading("smollm2:135m", "Downloading smollm2:135m", 0.92))


async def tools(chat: Chatting) -> None:
    read = ToolInfo("files__read_file", "Read a file of the folder, as text. Fails for files over 1 MB.", True)
    files = ToolServer("files", "ready", "", (read, ToolInfo("files__write_file", "Write a file.")), 3)
    servers = [files, ToolServer("web", "failed", "The command was not found: npx.")]
    chat.client.tools.listed = [*servers, ToolServer("time", "disabled")]
    await chat.type("/tools")
    await chat.until(lambda: isinstance(chat.app.screen, ToolsScreen) and "tools active" in chat.label("#summary"))
    await chat.pilot.press("down")


STEPS: dict[str, Step] = {
    "welcome": welcome,
    "chat": nothing,
    "commands": typed_command,
    "list": narrow_list,
    "models": catalog,
    "engine": opened(EngineScreen, "f3"),
    "help": opened(HelpScreen, "f1"),
    "settings": opened(SettingsScreen, "ctrl+s"),
    "extracts": taken_out,
    "branches": opened(BranchesScreen, "ctrl+t"),
    "tools": tools,
    "search": searched,
    "full-context": full_context,
    "confirm": asked_to_open,
}


def normalized(svg: str) -> str:
    """Remove the parts of a picture that depend on the time or on a hash."""
    svg = re.sub(r"terminal-\d+-", "terminal-", svg)
    return re.sub(r"\n\s*\n", "\n", svg)


async def pictures(step: Step, looks: Sequence[str]) -> dict[str, str]:
    """Return pictures of one screen, by the names of the looks."""
    client, name = scene()
    first, theme = LOOKS[looks[0]]
    app = ChatApp(client, chat=name, theme=theme)
    taken: dict[str, str] = {}
    async with app.run_test(size=first) as pilot:
        app.animation_level = "none"
        chat = Chatting(app, pilot, client)
        await chat.until(lambda: len(chat.views()) > 0)
        await chat.until(lambda: chat.screen.query_one(StatusLine).budget is not None)
        await step(chat)
        await settled(chat)
        for look in looks:
            size, app.theme = LOOKS[look]
            await pilot.resize_terminal(*size)
            await settled(chat)
            taken[look] = normalized(app.export_screenshot(simplify=True))
    return taken


async def settled(chat: Chatting) -> None:
    """Wait until several consecutive frames are equal. Stops the blinking of the cursor."""
    frames: deque[str] = deque(maxlen=4)
    while len(frames) < 4 or len(set(frames)) > 1:
        for screen in chat.app.screen_stack:
            for area in screen.query(TextArea):
                area.cursor_blink = False
            for line in screen.query(Input):
                line.cursor_blink = False
        await chat.pilot.pause(0.05)
        frames.append("".join(str(strip) for strip in chat.app.screen._compositor.render_strips()))


def main() -> None:
    os.environ |= {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
    chosen = sys.argv[1:] or list(STEPS)
    FOLDER.mkdir(exist_ok=True)
    for name in chosen:
        for look, svg in asyncio.run(pictures(STEPS[name], list(LOOKS))).items():
            (FOLDER / f"{name}-{look}.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
