"""The commands of the plain chat: those of the table of the screens that make sense in lines, and one to open chats."""

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

from app.terminal_chat.loading_lines import LoadingLines
from tui.client import Client, ClientError
from tui.commands import COMMANDS
from tui.nouns import Chat, ChatId, ChatSettings, ChatSummary, ExportFormat, MessageId, Role

Handler = Callable[[str], Awaitable[MessageId | None]]

_OPEN = "open"
_OPEN_HELP = "Go on with a chat of the list"


class PlainCommands:
    """Over the port; keeps which chat is open. `say` writes a line."""

    def __init__(self, client: Client, say: Callable[[str], None]) -> None:
        self._client = client
        self._say = say
        self._chat: ChatId | None = None
        self._private = False
        self._listed: Sequence[ChatSummary] = ()
        self._deleted: ChatId | None = None
        self.is_over = False
        self._handlers: Mapping[str, Handler] = {
            "new": self._new,
            "private": self._new_private,
            "regenerate": self._regenerate,
            "system": self._system,
            "preset": self._preset,
            "search": self._search,
            "chats": self._list,
            _OPEN: self._open,
            "title": self._title,
            "pin": self._pin,
            "archive": self._archive,
            "delete": self._delete,
            "undo": self._undo,
            "export": self._export,
            "import": self._import,
            "models": self._models,
            "load": self._load,
            "engine": self._engine,
            "address": self._address,
            "help": self._help,
            "quit": self._quit,
        }

    async def current(self) -> Chat:
        """The chat that is open; a new one, where none is."""
        if self._chat is None:
            made = await self._client.chats.create(ChatSettings(), private=self._private)
            self._chat = made.summary.id
            return made
        return await self._client.chats.open(self._chat)

    async def do(self, name: str, rest: str) -> MessageId | None:
        """A command. Gives the message that is to be answered anew, if it asks for that. Raises ClientError."""
        handler = self._handlers.get(name)
        if handler is None:
            raise ClientError(f"there is no command /{name} here", "/help lists those there are.")
        return await handler(rest)

    async def _new(self, rest: str) -> None:
        self._chat, self._private = None, False
        self._say("A new chat.")

    async def _new_private(self, rest: str) -> None:
        self._chat, self._private = None, True
        self._say("A new chat, which is never written to disk.")

    async def _regenerate(self, rest: str) -> MessageId:
        chat = await self.current()
        messages = {message.id: message for message in chat.messages}
        last = messages.get(chat.leaf) if chat.leaf is not None else None
        asked = last.parent if last is not None and last.role is Role.ASSISTANT else last.id if last else None
        if asked is None:
            raise ClientError("there is no message to answer")
        return asked

    async def _system(self, rest: str) -> None:
        chat = await self.current()
        await self._client.chats.configure(chat.summary.id, replace(chat.settings, system=rest))
        self._say("The system prompt is set." if rest else "There is no system prompt any more.")

    async def _preset(self, rest: str) -> None:
        presets = {preset.name: preset for preset in await self._client.chats.presets()}
        if rest not in presets:
            raise ClientError(f"there is no preset {rest}".rstrip(), f"There is: {', '.join(presets) or 'none'}.")
        await self._client.chats.configure((await self.current()).summary.id, presets[rest].settings)
        self._say(f"The chat has the preset {rest}.")

    async def _search(self, rest: str) -> None:
        hits = await self._client.chats.search(rest)
        self._listed = list(dict.fromkeys(hit.chat for hit in hits))
        for hit in hits:
            number = self._listed.index(hit.chat) + 1
            self._say(f"{number}. {hit.chat.title}: {hit.before}{hit.match}{hit.after}".replace("\n", " "))
        if not hits:
            self._say("Nothing was found.")

    async def _list(self, rest: str) -> None:
        self._listed = await self._client.chats.summaries()
        for number, chat in enumerate(self._listed, 1):
            marks = ", pinned" * chat.pinned + ", private" * chat.private
            self._say(f"{number}. {chat.title} ({chat.message_count} messages{marks})")
        self._say("/open and a number goes on with one." if self._listed else "There are no chats.")

    async def _open(self, rest: str) -> None:
        if not rest.isdecimal() or not 0 < int(rest) <= len(self._listed):
            raise ClientError("no such number in the list", "/chats lists them; then /open 1.")
        self._chat = self._listed[int(rest) - 1].id
        chat = await self.current()
        self._say(f"{chat.summary.title}:")
        messages = {message.id: message for message in chat.messages}
        branch, leaf = [], chat.leaf
        while leaf is not None and leaf in messages:
            branch.append(messages[leaf])
            leaf = messages[leaf].parent
        for message in branch[::-1]:
            self._say(f"{'You' if message.role is Role.USER else 'Model'}: {message.text}")

    async def _title(self, rest: str) -> None:
        await self._client.chats.rename((await self.current()).summary.id, rest)
        self._say("The chat has that title.")

    async def _pin(self, rest: str) -> None:
        summary = (await self.current()).summary
        await self._client.chats.pin(summary.id, not summary.pinned)
        self._say("Not pinned any more." if summary.pinned else "Pinned.")

    async def _archive(self, rest: str) -> None:
        summary = (await self.current()).summary
        await self._client.chats.archive(summary.id, not summary.archived)
        self._say("Back among the chats." if summary.archived else "In the archive.")

    async def _delete(self, rest: str) -> None:
        self._deleted = (await self.current()).summary.id
        await self._client.chats.delete(self._deleted)
        self._chat = None
        self._say("Deleted. /undo brings it back.")

    async def _undo(self, rest: str) -> None:
        if self._deleted is None:
            raise ClientError("nothing was deleted")
        await self._client.chats.undelete(self._deleted)
        self._chat, self._deleted = self._deleted, None
        self._say("The chat is back.")

    async def _export(self, rest: str) -> None:
        path = _path(rest)
        form = ExportFormat.JSON if path.suffix == ".json" else ExportFormat.MARKDOWN
        await self._client.chats.export((await self.current()).summary.id, path, form)
        self._say(f"Written to {path}.")

    async def _import(self, rest: str) -> None:
        self._listed = await self._client.chats.import_chats(_path(rest))
        self._say(f"{len(self._listed)} chats. /open 1 goes on with the first.")

    async def _models(self, rest: str) -> None:
        models = [*await self._client.models.installed(), *await self._client.models.catalog()]
        for name in dict.fromkeys(model.name for model in models):
            found = [model for model in models if model.name == name]
            marks = ", here" * any(one.installed for one in found) + ", answers" * any(one.loaded for one in found)
            self._say(f"{name}{marks}")

    async def _load(self, rest: str) -> None:
        lines = LoadingLines()
        async with aclosing(self._client.models.load(rest)) as states:
            async for state in states:
                if line := lines.line(state):
                    self._say(line)
        self._say(f"Replies come from {rest} now.")

    async def _engine(self, rest: str) -> None:
        status = await self._client.engine.status()
        self._say(f"{status.model}: {len(status.requests)} requests, {status.reply_tokens} tokens generated.")
        for request in status.requests:
            self._say(f"{request.client or 'a program'}: {request.phase.value}, {request.reply_tokens} tokens")

    async def _address(self, rest: str) -> None:
        self._say(self._client.engine.address() or "The engine is not there yet.")

    async def _help(self, rest: str) -> None:
        for command in COMMANDS:
            if command.name in self._handlers:
                self._say(f"/{command.name} {command.takes}".rstrip() + f": {command.help}")
        self._say(f"/{_OPEN} NUMBER: {_OPEN_HELP}")

    async def _quit(self, rest: str) -> None:
        self.is_over = True


def _path(text: str) -> Path:
    if not text:
        raise ClientError("a path is needed", "Put it behind the command.")
    return Path(os.path.expanduser(text)).absolute()
