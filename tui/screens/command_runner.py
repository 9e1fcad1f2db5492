"""Runs the commands that the user types or chooses, each on the object that owns it."""

from difflib import get_close_matches

from textual.dom import DOMNode
from textual.screen import Screen

from tui.commands import COMMANDS, Command, Owner, find_command
from tui.screens.chat_dialogs import ChatDialogs
from tui.widgets.chat_list import ChatList
from tui.widgets.conversation import Conversation


class CommandRunner:
    """Runs commands on the chat screen and its parts."""

    def __init__(self, screen: Screen[None], conversation: Conversation, chats: ChatList, dialogs: ChatDialogs) -> None:
        self._screen = screen
        self._conversation = conversation
        self._chats = chats
        self._dialogs = dialogs

    async def run(self, name: str) -> None:
        """Run a command without an argument."""
        if (found := find_command(name)) is not None:
            await self._run(found, "")

    async def run_typed(self, name: str, argument: str) -> None:
        """Run a command that the user typed. If there is none of this name, suggest a similar one."""
        if (found := find_command(name)) is not None:
            await self._run(found, argument)
            return
        names = [known for one in COMMANDS for known in (one.name, *one.aliases)]
        close = get_close_matches(name, names, n=1)
        advice = f"Did you mean /{close[0]}?" if close else "F1 lists all commands."
        self._screen.app.notify(f"Unknown command /{name}. {advice}", severity="warning", markup=False)
        self._conversation.composer.put_back(f"/{name} {argument}".strip())

    async def _run(self, command: Command, argument: str) -> None:
        if command.owner is Owner.DIALOGS:
            dialog = self._dialogs.by_action[command.action]
            self._screen.run_worker(dialog(argument), description=command.action)
            return
        owners: dict[Owner, DOMNode] = {
            Owner.APP: self._screen.app,
            Owner.SCREEN: self._screen,
            Owner.CHAT: self._conversation,
            Owner.CHATS: self._chats,
        }
        arguments = (argument,) if command.takes else ()
        await self._screen.app.run_action(("", command.action, arguments), owners[command.owner])
