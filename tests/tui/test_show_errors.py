"""Tests for errors of commands, and for results that arrive after the user has closed their screen."""

import pytest
from textual.css.query import NoMatches

from tests.tui.pilots import Chatting, run
from tests.tui.scripted_client import ScriptedClient
from tui.client import ClientError
from tui.screens.dialog import Ask
from tui.screens.search import SearchScreen
from tui.show_errors import show_errors


def test_query_for_a_closed_screen_raises_no_error() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.pilot.press("ctrl+f")
        await chat.until(lambda: isinstance(chat.app.screen, SearchScreen))
        screen = chat.app.screen
        with pytest.raises(NoMatches), show_errors(screen):
            screen.query_one("#nothing")
        await chat.pilot.press("escape")
        await chat.until(lambda: chat.app.screen is not screen)
        with show_errors(screen):
            screen.query_one("#nothing")

    run(ScriptedClient(), flow)


async def fail(*_: object) -> None:
    raise ClientError("It failed.", "Correct it.")


@pytest.mark.parametrize("command", ["export", "backup", "import", "attach", "load", "preset"])
def test_command_that_failed_returns_to_the_prompt(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client = ScriptedClient()
    for owner, method in ((client.chats, "export"), (client.chats, "export_all"), (client.models, "find")):
        monkeypatch.setattr(owner, method, fail)

    async def flow(chat: Chatting) -> None:
        await chat.say("hello")
        await chat.type(f"/{command} ./none.json")
        await chat.until(lambda: chat.composer.area.text == f"/{command} ./none.json")
        assert len(chat.notices()) == 1

    run(client, flow)


def test_path_of_a_failed_command_that_was_typed_in_a_dialog_returns_to_the_prompt() -> None:
    async def flow(chat: Chatting) -> None:
        await chat.type("/import")
        await chat.until(lambda: isinstance(chat.app.screen, Ask))
        await chat.pilot.press(*"none", "enter")
        await chat.until(lambda: chat.composer.area.text == "/import none")

    run(ScriptedClient(), flow)
