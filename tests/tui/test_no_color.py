"""Tests that selection and focus are visible without colors, and in a terminal with 16 colors."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from rich.style import Style
from textual.widgets import OptionList, Select

from tests.tui.pilots import Chatting
from tests.tui.scripted_client import ScriptedClient
from tui.app import ChatApp
from tui.screens.models import ModelsScreen
from tui.screens.settings import SettingsScreen

Step = Callable[[Chatting], Awaitable[str]]


def is_marked(style: Style | None, *, colors: bool) -> bool:
    """Whether a cell differs from its neighbors by more than the color of its text."""
    if style is None:
        return False
    return bool(style.bgcolor and not style.bgcolor.is_default) if colors else bool(style.reverse)


def marked_lines(app: ChatApp, *, colors: bool) -> list[str]:
    """Return the marked text of each line that has some."""
    strips = app.screen._compositor.render_strips()
    lines = ("".join(part.text for part in strip if is_marked(part.style, colors=colors)) for strip in strips)
    return [line.strip() for line in lines if line.strip()]


async def command_menu(chat: Chatting) -> str:
    await chat.pilot.press("/")
    await chat.until(lambda: chat.composer.menu.is_open)
    await chat.pilot.press("down")
    return "/private"


async def chat_list(chat: Chatting) -> str:
    await chat.pilot.press("f6")
    await chat.until(lambda: isinstance(chat.app.focused, OptionList))
    return "First"


async def models(chat: Chatting) -> str:
    await chat.pilot.press("f2")
    await chat.until(
        lambda: isinstance(chat.app.screen, ModelsScreen) and any("llama3.3" in one for one in chat.lines())
    )
    await chat.pilot.press("down")
    return "qwen3:4b"


async def select_field(chat: Chatting) -> str:
    await chat.screen.action_run_command("settings")
    await chat.until(lambda: isinstance(chat.app.screen, SettingsScreen) and chat.app.screen.is_mounted)
    chat.app.screen.query_one("#thinking", Select).focus()
    return "Model default"


async def message(chat: Chatting) -> str:
    await chat.pilot.press("shift+tab", "up")
    return "You"


async def theme_palette(chat: Chatting) -> str:
    await chat.type("/theme")
    listed = "ansi-light"  # the next after the theme in use
    await chat.until(lambda: chat.app.screen.query("ChoiceScreen Rows") and any(listed in it for it in chat.lines()))
    await chat.pilot.press("down")
    return listed


STEPS: tuple[Step, ...] = (command_menu, chat_list, models, select_field, message, theme_palette)


@pytest.mark.share(2)
@pytest.mark.parametrize("step", STEPS)
def test_focus_is_reversed_without_colors(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    check(step, colors=False)


@pytest.mark.share(2)
@pytest.mark.parametrize("step", [command_menu, chat_list, models, select_field])
def test_focus_has_a_background_in_16_colors(step: Step) -> None:
    check(step, colors=True)


def check(step: Step, *, colors: bool) -> None:
    """Check that the line which `step` chooses is marked, and no line that it does not choose."""
    client = ScriptedClient()
    chat = client.keep("First", "one", "a reply")
    client.engine.loads.set()

    async def go() -> None:
        app = ChatApp(client, chat=chat, theme="ansi-dark", colors=colors)
        async with app.run_test(size=(80, 24)) as pilot:
            chatting = Chatting(app, pilot, client)
            await chatting.until(lambda: len(chatting.views()) == 2)
            chosen = await step(chatting)
            await asyncio.wait_for(
                chatting.until(lambda: any(chosen in one for one in marked_lines(app, colors=colors))), timeout=120
            )
            assert sum(len(one) > 2 for one in marked_lines(app, colors=colors)) <= 2  # the title as well

    asyncio.run(go())


def test_bar_of_the_focused_message_is_thick_without_colors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other bars are thin, so that the bar of each author shows the focus."""
    monkeypatch.setenv("NO_COLOR", "1")
    client = ScriptedClient()
    name = client.keep("First", "one", "a reply")

    async def main() -> None:
        app = ChatApp(client, chat=name, colors=False)
        client.engine.loads.set()
        async with app.run_test(size=(80, 24)) as pilot:
            chat = Chatting(app, pilot, client)
            await chat.until(lambda: len(chat.views()) == 2)
            for focused in chat.views():
                focused.focus()
                await chat.pilot.pause()
                thick = [view for view in chat.views() if view.styles.border_left[0] == "thick"]
                assert thick == [focused]

    asyncio.run(main())


def test_scroll_bar_shows_its_thumb_without_colors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    client = ScriptedClient()
    name = client.keep("Long", *("a line\n\n" * 12 for _ in range(12)))

    async def main() -> None:
        app = ChatApp(client, chat=name, colors=False)
        client.engine.loads.set()
        async with app.run_test(size=(80, 24)) as pilot:
            chat = Chatting(app, pilot, client)
            await chat.until(lambda: chat.conversation.transcript.max_scroll_y > 0)

            def cells() -> list[bool]:
                bar = chat.conversation.transcript.vertical_scrollbar.region
                strips = app.screen._compositor.render_strips()
                column = [strips[y].crop(bar.x, bar.right) for y in range(bar.y, bar.bottom)]
                return [any(is_marked(part.style, colors=False) for part in strip) for strip in column]

            await chat.until(lambda: 0 < sum(cells()) < len(cells()))

    asyncio.run(main())
