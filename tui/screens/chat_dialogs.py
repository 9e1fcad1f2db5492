"""Commands that open a dialog about the open chat, or change its settings. Dialogs are imported when they open."""

from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path

from textual.worker import Worker

from tui.client import Client
from tui.screens import chat_settings
from tui.screens.dialog import ask
from tui.show_errors import show_errors
from tui.tool_servers import ToolServers, count_active
from tui.widgets.conversation import Conversation


class ChatDialogs:
    """The dialogs of the chat screen, by the action of their command."""

    def __init__(self, conversation: Conversation, client: Client, editor: str) -> None:
        """`editor`: the command that starts the user's editor; "": a common editor."""
        self._conversation = conversation
        self._client = client
        self._tool_servers = ToolServers(client.tools, partial(chat_settings.report_failed_tools, conversation))
        self.editor = editor
        self.by_action: Mapping[str, Callable[[str], Coroutine[None, None, None]]] = {
            "search": self.search,
            "branches": lambda _: self._choose_branch(),
            "attach": self._attach,
            "editor": lambda _: self._open_editor(),
            "settings": lambda _: chat_settings.edit(conversation, client),
            "tools": lambda _: self._choose_tools(),
            "system": lambda text: chat_settings.set_system_prompt(conversation, client, text),
            "set": lambda text: chat_settings.set_parameter(conversation, text),
            "preset": lambda name: chat_settings.use_preset(conversation, client, name),
        }

    async def search(self, text: str) -> None:
        """Let the user search all chats for a text, and open the message found."""
        from tui.screens.search import SearchScreen

        found = await self._conversation.app.push_screen_wait(SearchScreen(self._client.chats, text))
        if found is not None:
            await self._conversation.open(found.chat, found.message)

    async def _choose_branch(self) -> None:
        from tui.screens.branches import BranchesScreen

        conversation, chat = self._conversation, self._conversation.chat
        if chat.leaf is None:
            conversation.notify_empty()
            return
        if (running := conversation.current_reply) is not None and (written := running.snapshot()) is not None:
            chat.branches.put(written)
        message = await conversation.app.push_screen_wait(BranchesScreen(chat.branches, chat.leaf))
        if message is not None and chat is conversation.chat:
            await conversation.show_branch(chat.branches.newest_leaf(message), message)

    async def _attach(self, path: str) -> None:
        wanted = path or await ask(self._conversation, "Attach file:")
        if wanted and not self._conversation.composer.attach_path(Path(wanted)):
            self._conversation.composer.put_back(f"/attach {wanted}")

    async def _choose_tools(self) -> None:
        await chat_settings.choose_tools(self._conversation, self._client)
        self.find_tools()

    def find_tools(self) -> Worker[None]:
        """Start the tool servers in the background: at the start, and after the dialog, in which they may change."""
        return self._conversation.run_worker(self._start_tools, exclusive=True, group="tools", description="tools")

    async def _start_tools(self) -> None:
        with show_errors(self._conversation):
            await self._tool_servers.start()

    @property
    def active_tools(self) -> str:
        """Text with the number of tools that the open chat offers; empty if there are no servers."""
        return count_active(self._tool_servers.found, self._conversation.chat.settings.disabled_tools)

    async def _open_editor(self) -> None:
        """Edit the draft in the user's editor. Private drafts are never written to disk, and an editor needs a file."""
        from tui.editor import edit

        app, area = self._conversation.app, self._conversation.composer.area
        if self._conversation.chat.private:
            app.notify("A private chat has no editor, because editors write files.", markup=False)
            return
        with show_errors(self._conversation):
            before = area.text
            after = await edit(app, self.editor, before)
            area.replace_end(before, after)
