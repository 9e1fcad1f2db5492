"""The commands of the plain chat, as a table. Those about the open chat and the list are here."""

import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.terminal_chat.plain_models import PlainModels
from app.terminal_chat.plain_room import PlainRoom
from app.terminal_chat.plain_settings import PlainSettings
from tui.attaching import attachment
from tui.client import Client, ClientError
from tui.nouns import Attachment, Chat, ChatId, ChatSettings, ChatSummary, ExportFormat, MessageId, Role

Handler = Callable[[str], Awaitable[MessageId | None]]


@dataclass(frozen=True, slots=True)
class PlainCommand:
    """A command, and its line in /help. It may give a message that is to be answered anew."""

    name: str
    takes: str  # what may stand behind the name
    help: str
    run: Handler


class PlainCommands:
    """Over the port; keeps which chat is open. `say` writes a line, `agrees` asks a question."""

    def __init__(
        self,
        client: Client,
        say: Callable[[str], None],
        room: PlainRoom,
        agrees: Callable[[str], Awaitable[bool]],
    ) -> None:
        self._client = client
        self._say = say
        self._chat: ChatId | None = None
        self.is_private = False  # the chat that is open, or the new one
        self._listed: Sequence[ChatSummary] = ()
        self._deleted: ChatId | None = None
        self.attached: list[Attachment] = []  # to the next message
        self.is_over = False
        self._room = room
        self._agrees = agrees
        self._table = {command.name: command for command in self._commands()}

    def _commands(self) -> Sequence[PlainCommand]:
        models = PlainModels(self._client, self._say, self._agrees)
        settings = PlainSettings(self._client, self._say, self.current)
        return (
            PlainCommand("new", "", "Begin a new chat", self._new),
            PlainCommand("private", "", "Begin a chat that is never written to disk", self._new_private),
            PlainCommand("attach", "PATH", "Attach a text file to the next message; alone, none", self._attach),
            PlainCommand("regenerate", "", "Another reply to the last message", self._regenerate),
            PlainCommand("system", "TEXT", "Set the system prompt of this chat; alone, tell it", settings.system),
            PlainCommand("settings", "", "The settings of this chat", settings.show),
            PlainCommand("set", "NAME VALUE", "Change one of them; without a value, as at first", settings.set),
            PlainCommand("preset", "NAME", "Use a preset for this chat", settings.preset),
            PlainCommand("room", "summarize|drop", "Make room in the context, of the oldest messages", self._make_room),
            PlainCommand("search", "TEXT", "Search all chats", self._search),
            PlainCommand("chats", "", "List the chats, with numbers", self._list),
            PlainCommand("open", "NUMBER", "Go on with a chat of the list", self._open),
            PlainCommand("title", "TITLE", "Give this chat a title", self._title),
            PlainCommand("pin", "", "Pin this chat to the top of the list, or unpin it", self._pin),
            PlainCommand("archive", "", "Move this chat to the archive, or back", self._archive),
            PlainCommand("delete", "", "Delete this chat", self._delete),
            PlainCommand("undo", "", "Bring back the chat that was deleted last", self._undo),
            PlainCommand("export", "PATH", "Write this chat to a file: .md this branch, .json all", self._export),
            PlainCommand("import", "PATH", "Read chats from a .json file", self._import),
            PlainCommand("models", "[catalog]", "List the models that are here, or those of the catalog", models.list),
            PlainCommand("load", "NAME", "Answer with another model; it is fetched if it is not here", models.load),
            PlainCommand("engine", "", "What the engine does, and for whom", models.tell_engine),
            PlainCommand("address", "", "The address for other programs", models.tell_address),
            PlainCommand("help", "", "List the commands", self._help),
            PlainCommand("quit", "", "Leave the chat", self._quit),
        )

    async def current(self) -> Chat:
        """The chat that is open; a new one, where none is."""
        if self._chat is None:
            made = await self._client.chats.create(ChatSettings(), private=self.is_private)
            self._chat = made.summary.id
            return made
        return await self._client.chats.open(self._chat)

    async def do(self, name: str, rest: str) -> MessageId | None:
        """A command. Gives the message that is to be answered anew, if it asks for that. Raises ClientError."""
        if name not in self._table:
            raise ClientError(f"there is no command /{name} here", "/help lists those there are.")
        return await self._table[name].run(rest)

    async def _new(self, rest: str) -> None:
        self._chat, self.is_private = None, False
        self._say("A new chat.")

    async def _new_private(self, rest: str) -> None:
        self._chat, self.is_private = None, True
        self._say("A new chat, which is never written to disk.")

    async def _regenerate(self, rest: str) -> MessageId:
        chat = await self.current()
        messages = {message.id: message for message in chat.messages}
        last = messages.get(chat.leaf) if chat.leaf is not None else None
        asked = last.parent if last is not None and last.role is Role.ASSISTANT else last.id if last else None
        if asked is None:
            raise ClientError("there is no message to answer")
        return asked

    async def _attach(self, rest: str) -> None:
        if not rest:
            self.attached.clear()
            self._say("No file goes with the next message.")
            return
        attached = attachment(_path(rest))
        tokens = await self._client.replies.count_tokens(attached.text)
        self.attached.append(attached)
        self._say(f"{attached.name}: {tokens:,} tokens, beside the next message.")

    async def _make_room(self, rest: str) -> None:
        await self._room.make(await self.current(), rest)

    async def _search(self, rest: str) -> None:
        hits = await self._client.chats.search(rest)
        self._listed = list(dict.fromkeys(hit.chat for hit in hits))
        for hit in hits:
            number = self._listed.index(hit.chat) + 1
            private = " (private)" * hit.chat.private
            self._say(f"{number}. {hit.chat.title}{private}: {hit.before}{hit.match}{hit.after}".replace("\n", " "))
        if not hits:
            self._say("Nothing was found.")

    async def _list(self, rest: str) -> None:
        self._listed = await self._client.chats.summaries()
        for number, chat in enumerate(self._listed, 1):
            marks = ", pinned" * chat.pinned + ", private" * chat.private
            size = f"{chat.message_count} messages" if chat.message_count else "draft"
            self._say(f"{number}. {chat.title} ({size}{marks})")
        self._say("/open and a number goes on with one." if self._listed else "There are no chats.")

    async def _open(self, rest: str) -> None:
        if not rest.isdecimal() or not 0 < int(rest) <= len(self._listed):
            raise ClientError("no such number in the list", "/chats lists them; then /open 1.")
        self._chat = self._listed[int(rest) - 1].id
        chat = await self.current()
        self.is_private = chat.summary.private
        self._say(f"{chat.summary.title}{' (private)' * self.is_private}:")
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
        self.is_private = (await self.current()).summary.private
        self._say("The chat is back.")

    async def _export(self, rest: str) -> None:
        path = _path(rest)
        form = ExportFormat.JSON if path.suffix == ".json" else ExportFormat.MARKDOWN
        await self._client.chats.export((await self.current()).summary.id, path, form)
        self._say(f"Written to {path}.")

    async def _import(self, rest: str) -> None:
        self._listed = await self._client.chats.import_chats(_path(rest))
        self._say(f"{len(self._listed)} chats. /open 1 goes on with the first.")

    async def _help(self, rest: str) -> None:
        for command in self._table.values():
            self._say(f"/{command.name} {command.takes}".rstrip() + f": {command.help}.")

    async def _quit(self, rest: str) -> None:
        self.is_over = True


def _path(text: str) -> Path:
    if not text:
        raise ClientError("a path is needed", "Put it behind the command.")
    return Path(os.path.expanduser(text)).absolute()
