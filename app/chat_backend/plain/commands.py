"""Slash commands of the plain chat, printed as lines.

Names and help texts are those of the screens. Commands that need a screen raise an error that says so.
"""

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from app.chat_backend.plain.branches import PlainBranches, branch_lines, shown_branch
from app.chat_backend.plain.models import PlainModels
from app.chat_backend.plain.settings import PlainSettings
from app.chat_backend.plain.tools import PlainTools
from app.chat_backend.plain.trimming import PlainTrimming
from tui.client import Client, ClientError
from tui.clipboard import Clipboard
from tui.commands import COMMANDS, Command, Owner, find_command
from tui.drafts import read_attachment
from tui.open_chat import settings_of_new_chats
from tui.types import (
    AUTHORS,
    Attachment,
    Chat,
    ChatId,
    ChatSummary,
    ExportFormat,
    Message,
    MessageId,
    Role,
)

ONLY_IN_PLAIN = (Command("open", Owner.CHATS, "", "Open a chat from the list", "NUMBER"),)
# arguments that replace the dialogs of the screens
_TAKES = {
    "edit": "TEXT",
    "branches": "[NUMBER]",
    "room": "summarize|drop",
    "models": "[catalog]",
    "tools": "[on|off|revoke|restart NAME]",
}
# descriptions of commands that print what the screens show
_HELPS = {
    "chats": "List the chats with numbers",
    "resume": "List the chats, as /chats does",
    "branches": "List the branches with numbers, or show one",
}

Handler = Callable[[str], Awaitable[MessageId | None]]


class PlainCommands:
    """Runs commands and keeps the open chat. `say` writes a line, and `agrees` asks the user a yes-or-no question."""

    def __init__(
        self,
        client: Client,
        say: Callable[[str], None],
        trimming: PlainTrimming,
        agrees: Callable[[str], Awaitable[bool]],
        clipboard: Clipboard,
    ) -> None:
        self._client = client
        self._say = say
        self._chat: ChatId | None = None
        self.is_private = False  # whether the open chat, or the next new one, is private
        self._listed: Sequence[ChatSummary] = ()
        self._deleted: ChatId | None = None
        self.attached: list[Attachment] = []  # files attached to the next message
        self.is_over = False
        self._trimming = trimming
        self._agrees = agrees
        self._clipboard = clipboard
        self._handlers = self._all_handlers()

    def _all_handlers(self) -> Mapping[str, Handler]:
        models = PlainModels(self._client, self._say, self._agrees)
        settings = PlainSettings(self._client, self._say, self.current)
        branches = PlainBranches(self._client, self._say, self.current, self._clipboard)
        return {
            "new": self._new,
            "private": self._new_private,
            "attach": self._attach,
            "regenerate": self._regenerate,
            "copy": branches.copy,
            "branches": branches.show,
            "edit": self._edit,
            "settings": settings.show,
            "system": settings.system,
            "set": settings.set,
            "preset": settings.preset,
            "room": self._trim_context,
            "search": self._search,
            "chats": self._list,
            "resume": self._list,
            "open": self._open,
            "title": self._title,
            "pin": self._pin,
            "archive": self._archive,
            "delete": self._delete,
            "undo": self._undo,
            "export": self._export,
            "backup": self._back_up,
            "import": self._import,
            "models": models.list,
            "load": models.load,
            "engine": models.tell_engine,
            "address": models.tell_address,
            "tools": PlainTools(self._client, self._say, self.current).do,
            "help": self._help,
            "quit": self._quit,
        }

    def commands(self) -> Sequence[Command]:
        """Return the commands that the plain chat supports."""
        listed = [command for command in (*COMMANDS, *ONLY_IN_PLAIN) if command.name in self._handlers]
        return [
            replace(one, takes=_TAKES.get(one.name, one.takes), help=_HELPS.get(one.name, one.help)) for one in listed
        ]

    async def current(self) -> Chat:
        """Return the open chat. Creates one if none is open."""
        if self._chat is None:
            settings = await settings_of_new_chats(self._client.chats)
            made = await self._client.chats.create(settings, private=self.is_private)
            self._chat = made.summary.id
            return made
        return await self._client.chats.open(self._chat)

    async def do(self, name: str, rest: str) -> MessageId | None:
        """Run a command. Returns the message to answer again, if the command asks for a reply, or None. Raises
        ClientError.
        """
        found = find_command(name) or next((one for one in ONLY_IN_PLAIN if one.name == name), None)
        if found is None:
            raise ClientError(f"unknown command /{name}", "/help lists all commands.")
        if found.name not in self._handlers:
            raise ClientError(f"the plain chat has no /{found.name}", "Start ingle chat without --plain for it.")
        return await self._handlers[found.name](rest)

    async def _new(self, rest: str) -> None:
        self._chat, self.is_private = None, False
        self._say("New chat.")

    async def _new_private(self, rest: str) -> None:
        self._chat, self.is_private = None, True
        self._say("Private chat: nothing is saved.")

    async def _regenerate(self, rest: str) -> MessageId:
        return (await self._last_question()).id

    async def _edit(self, rest: str) -> MessageId:
        """Add the text as a new branch that replaces the user's last message."""
        if not rest:
            raise ClientError("/edit needs a text", "Add the new text of your last message after /edit.")
        last = await self._last_question()
        chat = await self.current()
        return (await self._client.chats.add(chat.summary.id, last.parent, rest, last.attachments)).id

    async def _last_question(self) -> Message:
        """Return the last user message in the open branch. Raises ClientError if there is none."""
        for message in reversed(shown_branch(await self.current())):
            if message.role is Role.USER:
                return message
        raise ClientError("no message to answer")

    async def _attach(self, rest: str) -> None:
        if not rest:
            self.attached.clear()
            self._say("Attachments removed.")
            return
        attached = read_attachment(_path(rest))
        tokens = await self._client.replies.count_tokens(attached.text)
        self.attached.append(attached)
        self._say(f"{attached.name}: {tokens:,} tokens, attached to the next message.")

    async def _trim_context(self, rest: str) -> None:
        await self._trimming.trim(await self.current(), rest)

    async def _search(self, rest: str) -> None:
        hits = await self._client.chats.search(rest)
        self._listed = list(dict.fromkeys(hit.chat for hit in hits))
        for hit in hits:
            number = self._listed.index(hit.chat) + 1
            private = " (private)" * hit.chat.private
            author = "" if hit.role is None else f"{AUTHORS[hit.role]}: "
            text = f"{author}{hit.before}{hit.match}{hit.after}"
            self._say(f"{number}. {hit.chat.title}{private}: {text}".replace("\n", " "))
        if not hits:
            self._say("No results.")

    async def _list(self, rest: str) -> None:
        self._listed = await self._client.chats.summaries()
        for number, chat in enumerate(self._listed, 1):
            marks = ", pinned" * chat.pinned + ", private" * chat.private
            plural = "s" * (chat.message_count != 1)
            size = f"{chat.message_count} message{plural}" if chat.message_count else "draft"
            self._say(f"{number}. {chat.title} ({size}{marks})")
        self._say("/open NUMBER opens one." if self._listed else "There are no chats.")

    async def _open(self, rest: str) -> None:
        if not rest.isdecimal() or not 0 < int(rest) <= len(self._listed):
            raise ClientError(
                "the list has no chat with this number", "/chats lists all chats; /open 1 opens the first."
            )
        await self.open_chat(self._listed[int(rest) - 1].id)

    async def open_chat(self, opened: ChatId) -> None:
        """Open a chat, and print the branch that it shows."""
        self._chat = opened
        chat = await self.current()
        self.is_private = chat.summary.private
        self._say(f"{chat.summary.title}{' (private)' * self.is_private}:")
        for line in branch_lines(shown_branch(chat)):
            self._say(line)

    async def _title(self, rest: str) -> None:
        await self._client.chats.rename((await self.current()).summary.id, rest)
        self._say("Renamed.")

    async def _pin(self, rest: str) -> None:
        summary = (await self.current()).summary
        await self._client.chats.pin(summary.id, not summary.pinned)
        self._say("Unpinned." if summary.pinned else "Pinned.")

    async def _archive(self, rest: str) -> None:
        summary = (await self.current()).summary
        await self._client.chats.archive(summary.id, not summary.archived)
        self._say("Unarchived." if summary.archived else "Archived.")

    async def _delete(self, rest: str) -> None:
        summary = (await self.current()).summary
        if not await self._agrees(f"Delete “{summary.name}”? yes or no (/undo restores it until you quit)"):
            return
        self._deleted = summary.id
        await self._client.chats.delete(self._deleted)
        self._chat = None
        self._say("Deleted. /undo restores it.")

    async def _undo(self, rest: str) -> None:
        if self._deleted is None:
            raise ClientError("nothing to undo")
        await self._client.chats.undelete(self._deleted)
        self._chat, self._deleted = self._deleted, None
        self.is_private = (await self.current()).summary.private
        self._say("Restored.")

    async def _export(self, rest: str) -> None:
        path = _path(rest)
        form = ExportFormat.JSON if path.suffix == ".json" else ExportFormat.MARKDOWN
        await self._client.chats.export((await self.current()).summary.id, path, form)
        self._say(f"Saved to {path}.")

    async def _back_up(self, rest: str) -> None:
        path = _path(rest)
        self._say(f"Saved {await self._client.chats.export_all(path)} chats to {path}.")

    async def _import(self, rest: str) -> None:
        self._listed = await self._client.chats.import_chats(_path(rest))
        self._say(f"Imported {len(self._listed)} chats. /open 1 opens the first.")

    async def _help(self, rest: str) -> None:
        for command in self.commands():
            self._say(f"/{command.name} {command.takes}".rstrip() + f": {command.help}.")

    async def _quit(self, rest: str) -> None:
        self.is_over = True


def _path(text: str) -> Path:
    if not text:
        raise ClientError("the command needs a path", "Add the path after the command.")
    return Path(os.path.expanduser(text)).absolute()
