"""Slash commands of the plain chat: models, engine, context, and settings, printed as lines."""

import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path

from app.chat_backend.engine.loading_state import LoadingLines
from tui import figures, sampling_fields
from tui.client import Client, ClientError, NotLoaded
from tui.drafts import read_attachment
from tui.engine_types import ModelInfo
from tui.large_downloads import describe_download, needs_confirmation
from tui.sampling_fields import InvalidField
from tui.trimming import ContextTrimmer
from tui.types import (
    Attachment,
    Chat,
    ChatId,
    ChatSettings,
    ChatSummary,
    ContextBudget,
    ExportFormat,
    FullContext,
    MessageId,
    Role,
    TrimPlan,
)

_CATALOG = "catalog"
_FITS = {None: "", True: ", fits", False: ", too large"}


class PlainModels:
    """Commands about models. `say` writes a line. `agrees` asks a question; a pipe always agrees."""

    def __init__(self, client: Client, say: Callable[[str], None], agrees: Callable[[str], Awaitable[bool]]) -> None:
        self._client = client
        self._say = say
        self._agrees = agrees

    async def list(self, which: str) -> None:
        """List the installed models, or the catalog."""
        if which not in ("", _CATALOG):
            raise ClientError(
                f"there is no list {which}", "/models lists installed models, /models catalog those to download."
            )
        models = self._client.models
        found: Sequence[ModelInfo] = await (models.catalog() if which else models.installed())
        for model in found:
            self._say(_line(model))
        if not which:
            self._say(f"/models {_CATALOG} lists models to download." if found else "No models installed.")

    async def load(self, name: str) -> None:
        if not name:
            raise ClientError("a name is needed", "/models lists them.")
        if not await self._may_fetch(await self._client.models.find(name)):
            self._say("Nothing was downloaded.")
            return
        lines = LoadingLines()
        async with aclosing(self._client.models.load(name)) as states:
            async for state in states:
                if line := lines.line(state):
                    self._say(line)
        self._say(f"Now using {name}.")

    async def _may_fetch(self, model: ModelInfo) -> bool:
        free = await self._client.models.free_disk()
        if not needs_confirmation(model, free):
            return True
        self._say(describe_download(model, free))
        return await self._agrees("Download this model? yes or no")

    async def tell_engine(self, rest: str) -> None:
        status = await self._client.engine.status()
        self._say(f"{status.model}: {len(status.requests)} requests, {status.reply_tokens} tokens generated.")
        for request in status.requests:
            self._say(f"{request.client or 'a program'}: {request.phase.value}, {request.reply_tokens} tokens")

    async def tell_address(self, rest: str) -> None:
        self._say(self._client.engine.address() or "The engine is still starting.")


def _line(model: ModelInfo) -> str:
    """Describe a model in a line: "qwen3:4b, about 2.5 GB, fits"."""
    size = f", {'about ' * model.is_estimate}{figures.size(model.size)}" if model.size else ""
    if model.loaded:
        return f"{model.name}{size}, in use"
    if model.installed:
        return f"{model.name}{size}, installed"
    arrived = f", {figures.size(model.arrived)} downloaded" if model.arrived else ""
    return f"{model.name}{size}{arrived}{', downloading' * model.fetching}{_FITS[model.fits]}"


Ask = Callable[[str], Awaitable[str]]

_CHOICES = {"summarize": FullContext.SUMMARIZE, "drop": FullContext.DROP_OLDEST}
_QUESTION = "summarize: replace the oldest messages with a summary; drop: drop them; anything else: cancel."


class PlainTrimming:
    """Trims the context.

    `say` writes a line. `ask` writes a question and returns the answer, which is empty in a pipe.
    """

    def __init__(self, client: Client, say: Callable[[str], None], ask: Ask) -> None:
        self._context = client.context
        self._say = say
        self._ask = ask
        self._trimmer = ContextTrimmer(client.context, self._choose, self._tell_trimmed, self._tell)

    async def ensure_room(self, chat: Chat, leaf: MessageId | None, typed: str) -> bool:
        """Whether `typed` and a reply fit after `leaf`, after trimming if necessary. Raises ClientError if they cannot
        fit.
        """
        try:
            return await self._trimmer.ensure_room(chat.summary.id, leaf, typed, chat.settings.full_context)
        except NotLoaded:
            return True  # requesting the reply tries again, or reports why

    async def trim(self, chat: Chat, how: str) -> None:
        """Run the command /room."""
        if how not in _CHOICES:
            raise ClientError("choose how to free up context", "Use /room summarize or /room drop.")
        plan = await self._context.plan(chat.summary.id, chat.leaf, _CHOICES[how], "")
        if plan.tokens <= 0:
            raise ClientError("this would free no tokens")
        await self._trimmer.trim(chat.summary.id, plan)

    async def _choose(self, chat: ChatId, leaf: MessageId | None, typed: str, budget: ContextBudget) -> TrimPlan | None:
        self._say(f"The context is full. {figures.budget(budget)}.")
        how = _CHOICES.get((await self._ask(_QUESTION)).strip().lower())
        if how is None:
            raise ClientError("the context is full: nothing was sent", "Use /room drop, or /set full drop.")
        plan = await self._context.plan(chat, leaf, how, typed)
        if not plan.suffices(budget):
            raise ClientError("this would not free enough", "Try the other way, or start a new chat with /new.")
        return plan

    async def _tell_trimmed(self, chat: Chat) -> None:
        self._say(f"Done: {len(chat.left_out)} messages of this chat are no longer in context.")

    def _tell(self, activity: str) -> None:
        if activity:
            self._say(f"{activity.capitalize()}.")


_FULL = {how.value.partition("_")[0]: how for how in FullContext}
_THINKING: dict[str, bool | None] = {"on": True, "off": False, "": None}


class PlainSettings:
    """Settings of the open chat. `say` writes a line."""

    def __init__(self, client: Client, say: Callable[[str], None], current: Callable[[], Awaitable[Chat]]) -> None:
        self._chats = client.chats
        self._say = say
        self._current = current

    async def system(self, text: str) -> None:
        chat = await self._current()
        if text:
            await self._chats.configure(chat.summary.id, replace(chat.settings, system=text))
            self._say("The system prompt is set.")
        else:
            self._say(f"The system prompt: {chat.settings.system or 'none'}")

    async def show(self, rest: str) -> None:
        settings = (await self._current()).settings
        self._say(f"system: {settings.system or 'none'}")
        for name, value in _texts(settings).items():
            self._say(f"{name}: {value or 'model default'}")

    async def set(self, rest: str) -> None:
        """Set one setting by name. Without a value, reset it to the model's default."""
        name, _, value = rest.partition(" ")
        chat = await self._current()
        if name == "system":
            settings = replace(chat.settings, system=value.strip())
        else:
            settings = _changed(chat.settings, name, value.strip())
        await self._chats.configure(chat.summary.id, settings)
        self._say(f"{name}: {value.strip() or 'reset'}")

    async def preset(self, name: str) -> None:
        presets = {preset.name: preset for preset in await self._chats.presets()}
        if name not in presets:
            raise ClientError(f"there is no preset {name}".rstrip(), f"Available: {', '.join(presets) or 'none'}.")
        await self._chats.configure((await self._current()).summary.id, presets[name].settings)
        self._say(f"Preset {name} applied.")


def _texts(settings: ChatSettings) -> dict[str, str]:
    """Return the settings by the names that the user types."""
    thinking = next(text for text, value in _THINKING.items() if value is settings.sampling.thinking)
    full = next(text for text, how in _FULL.items() if how is settings.full_context)
    return {**sampling_fields.texts(settings.sampling), "thinking": thinking, "full": full}


def _changed(settings: ChatSettings, name: str, value: str) -> ChatSettings:
    """Return settings with one value changed. Raises ClientError for an unknown name or an invalid value."""
    typed = _texts(settings)
    if name not in typed:
        raise ClientError(f"there is no setting {name}".rstrip(), f"Available: system, {', '.join(typed)}.")
    typed[name] = value
    if typed["thinking"] not in _THINKING:
        raise ClientError(f"thinking cannot be {value}", "Use on or off.")
    if name == "full" and value and value not in _FULL:
        raise ClientError(f"full cannot be {value}", f"Use one of: {', '.join(_FULL)}.")
    try:
        sampling = sampling_fields.parse(typed, thinking=_THINKING[typed["thinking"]])
    except InvalidField as problem:
        raise ClientError(str(problem)) from problem
    return replace(settings, sampling=sampling, full_context=_FULL.get(typed["full"], FullContext.ASK))


Handler = Callable[[str], Awaitable[MessageId | None]]


@dataclass(frozen=True, slots=True)
class PlainCommand:
    """A command and its line in /help. `run` may return a message to answer again."""

    name: str
    takes: str  # the argument's name
    help: str
    run: Handler


class PlainCommands:
    """Runs commands and keeps the open chat. `say` writes a line, and `agrees` asks a question."""

    def __init__(
        self,
        client: Client,
        say: Callable[[str], None],
        trimming: PlainTrimming,
        agrees: Callable[[str], Awaitable[bool]],
    ) -> None:
        self._client = client
        self._say = say
        self._chat: ChatId | None = None
        self.is_private = False  # of the open chat, or of the new one
        self._listed: Sequence[ChatSummary] = ()
        self._deleted: ChatId | None = None
        self.attached: list[Attachment] = []  # to the next message
        self.is_over = False
        self._trimming = trimming
        self._agrees = agrees
        self._table = {command.name: command for command in self._commands()}

    def _commands(self) -> Sequence[PlainCommand]:
        models = PlainModels(self._client, self._say, self._agrees)
        settings = PlainSettings(self._client, self._say, self.current)
        return (
            PlainCommand("new", "", "New chat", self._new),
            PlainCommand("private", "", "Private chat (nothing saved)", self._new_private),
            PlainCommand("attach", "PATH", "Attach a text file to the next message (no path: detach)", self._attach),
            PlainCommand("regenerate", "", "Regenerate the last reply", self._regenerate),
            PlainCommand("system", "TEXT", "Set the system prompt of this chat (no text: show it)", settings.system),
            PlainCommand("settings", "", "The settings of this chat", settings.show),
            PlainCommand("set", "NAME VALUE", "Change a setting (no value: reset)", settings.set),
            PlainCommand("preset", "NAME", "Use a preset for this chat", settings.preset),
            PlainCommand(
                "room", "summarize|drop", "Free up context: summarize or drop old messages", self._trim_context
            ),
            PlainCommand("search", "TEXT", "Search all chats", self._search),
            PlainCommand("chats", "", "List the chats, with numbers", self._list),
            PlainCommand("open", "NUMBER", "Open a chat of the list", self._open),
            PlainCommand("title", "TITLE", "Rename this chat", self._title),
            PlainCommand("pin", "", "Pin or unpin", self._pin),
            PlainCommand("archive", "", "Archive or unarchive", self._archive),
            PlainCommand("delete", "", "Delete this chat", self._delete),
            PlainCommand("undo", "", "Undo delete", self._undo),
            PlainCommand("export", "PATH", "Export (.md: this branch, .json: everything)", self._export),
            PlainCommand("import", "PATH", "Import chats from JSON", self._import),
            PlainCommand("models", "[catalog]", "List installed models, or the catalog", models.list),
            PlainCommand("load", "NAME", "Switch model (downloads it if necessary)", models.load),
            PlainCommand("engine", "", "Engine activity", models.tell_engine),
            PlainCommand("address", "", "Show the API URL", models.tell_address),
            PlainCommand("help", "", "List the commands", self._help),
            PlainCommand("quit", "", "Quit", self._quit),
        )

    async def current(self) -> Chat:
        """Return the open chat. Creates one if none is open."""
        if self._chat is None:
            made = await self._client.chats.create(ChatSettings(), private=self.is_private)
            self._chat = made.summary.id
            return made
        return await self._client.chats.open(self._chat)

    async def do(self, name: str, rest: str) -> MessageId | None:
        """Run a command. Returns a message to answer again, or None. Raises ClientError."""
        if name not in self._table:
            raise ClientError(f"unknown command /{name}", "/help lists all commands.")
        return await self._table[name].run(rest)

    async def _new(self, rest: str) -> None:
        self._chat, self.is_private = None, False
        self._say("New chat.")

    async def _new_private(self, rest: str) -> None:
        self._chat, self.is_private = None, True
        self._say("Private chat: nothing is saved.")

    async def _regenerate(self, rest: str) -> MessageId:
        chat = await self.current()
        messages = {message.id: message for message in chat.messages}
        last = messages.get(chat.leaf) if chat.leaf is not None else None
        asked = last.parent if last is not None and last.role is Role.ASSISTANT else last.id if last else None
        if asked is None:
            raise ClientError("no message to answer")
        return asked

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
            self._say(f"{number}. {hit.chat.title}{private}: {hit.before}{hit.match}{hit.after}".replace("\n", " "))
        if not hits:
            self._say("No results.")

    async def _list(self, rest: str) -> None:
        self._listed = await self._client.chats.summaries()
        for number, chat in enumerate(self._listed, 1):
            marks = ", pinned" * chat.pinned + ", private" * chat.private
            size = f"{chat.message_count} messages" if chat.message_count else "draft"
            self._say(f"{number}. {chat.title} ({size}{marks})")
        self._say("/open NUMBER opens one." if self._listed else "There are no chats.")

    async def _open(self, rest: str) -> None:
        if not rest.isdecimal() or not 0 < int(rest) <= len(self._listed):
            raise ClientError("no such number in the list", "/chats lists them; then /open 1.")
        await self.open_chat(self._listed[int(rest) - 1].id)

    async def open_chat(self, opened: ChatId) -> None:
        """Open a chat, and print its shown branch."""
        self._chat = opened
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
        self._deleted = (await self.current()).summary.id
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

    async def _import(self, rest: str) -> None:
        self._listed = await self._client.chats.import_chats(_path(rest))
        self._say(f"Imported {len(self._listed)} chats. /open 1 opens the first.")

    async def _help(self, rest: str) -> None:
        for command in self._table.values():
            self._say(f"/{command.name} {command.takes}".rstrip() + f": {command.help}.")

    async def _quit(self, rest: str) -> None:
        self.is_over = True


def _path(text: str) -> Path:
    if not text:
        raise ClientError("a path is needed", "Add it after the command.")
    return Path(os.path.expanduser(text)).absolute()
