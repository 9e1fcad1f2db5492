"""Completion in the prompt: finds the text to complete at the cursor, and suggestions for it."""

import asyncio
import operator
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tui import commands, figures, fuzzy, sampling_fields
from tui.chat_files import file_stem
from tui.client import Client, ClientError
from tui.engine_types import ModelInfo
from tui.footer_keys import key_names
from tui.large_downloads import can_load
from tui.plain_text import single_line
from tui.types import NO_PRESET

_MOST = 200  # maximum number of rows in the menu
_FILE = re.compile(r"(?:^|\s)@([^\s@]*)$")


@dataclass(frozen=True, slots=True)
class Suggestion:
    """One row of the menu."""

    name: str  # the text that replaces the query
    label: str
    help: str = ""
    keys: str = ""
    aliases: tuple[str, ...] = ()
    takes_more: bool = False  # whether it is a command with an argument
    is_note: bool = False  # a remark about the list, which cannot be chosen

    @property
    def names(self) -> Iterable[str]:
        return (self.name, *self.aliases)


@dataclass(frozen=True, slots=True)
class Request:
    """The part of the prompt to complete: `query`, between the texts `before` and `after`."""

    source: str  # "commands", "@files", or the kind of a command's argument
    query: str
    before: str = ""
    after: str = ""

    @property
    def takes_first(self) -> bool:
        """Whether Enter chooses the first row.

        It does not for a new file, whose name is wanted as typed, and for an argument of which nothing is typed. A
        model with a slash may be a path or a repository that is not in the list.
        """
        if self.source in ("commands", "@files", "history"):
            return True
        is_named = self.source in ("presets", "themes", "files", "imports") or (
            self.source == "models" and "/" not in self.query
        )
        return is_named and bool(self.query)


@dataclass(frozen=True, slots=True)
class Choice:
    """The new state of the prompt after the user chose a suggestion."""

    text: str
    cursor: int  # an index into the text
    can_run: bool = False  # whether Enter runs the text as a command
    attach: Path | None = None
    name: str = ""  # of the file to attach, as `text` has it


_FILES = ("files", "new files", "imports", "@files")
# ends of names of files that are not text, which could not be attached
_NOT_TEXT = re.compile(
    r"\.(png|jpe?g|gif|webp|bmp|ico|tiff|pdf|mp[34]|wav|ogg|flac|mkv|mov|webm|woff2?|ttf|otf|zip|gz|xz|bz2|zst|tar|7z"
    r"|whl|jar|so|dylib|dll|exe|o|a|pyc|class|bin|dat|pkl|onnx|wasm|iso|gguf|safetensors|pt|np[yz]|parquet|sqlite|db)$",
    re.IGNORECASE,
)
_CUT = "Only the first {:,} files are listed. Type a folder, such as ./src/"
_ARGUMENTS: Mapping[str, str] = {
    "load": "models",
    "preset": "presets",
    "set": "parameters",
    "theme": "themes",
    "attach": "files",
    "import": "imports",
    "export": "exports",
    "backup": "new files",
}


def find_request(text: str, cursor: int) -> Request | None:
    """Return the part of the prompt to complete at the cursor, or None."""
    if (typed := commands.parse_command(text)) is not None:
        name, sep, argument = text[1:].partition(" ")
        if not sep:
            return Request("commands", typed[0], "/")
        command = commands.find_command(name)
        source = None if command is None else _ARGUMENTS.get(command.name)
        return None if source is None else Request(source, argument, f"/{name} ")
    if (found := _FILE.search(text[:cursor])) is not None:
        return Request("@files", found[1], text[: found.start(1) - 1], text[cursor:])
    return None


def folder_of(query: str) -> str:
    """Return the folder of a path that is typed from its start, with a slash at its end. Empty for a file's name."""
    return query[: query.rfind("/") + 1] if query.startswith(("/", "~", "./", "../")) else ""


def choose(request: Request, chosen: Suggestion) -> Choice:
    """Return the prompt with the query replaced by the suggestion."""
    is_folder = chosen.name.endswith("/")
    if request.source == "@files":
        start = f"{request.before}{'@' if is_folder else ''}{chosen.name}"
        path = None if is_folder else Path(chosen.name).expanduser()
        gap = "" if is_folder or request.after.startswith(" ") else " "
        return Choice(f"{start}{gap}{request.after}", len(start) + len(gap), attach=path, name=chosen.name)
    text = request.before + chosen.name + (" " if chosen.takes_more else "")
    return Choice(text, len(text), can_run=request.source not in ("history", "parameters") and not is_folder)


def command_suggestions(shown: Iterable[commands.Command] = commands.COMMANDS) -> list[Suggestion]:
    rows = []
    for one in shown:
        also = f" (also {', '.join(f'/{alias}' for alias in one.aliases)})" if one.aliases else ""
        label = f"/{one.name} {one.takes}".strip()
        rows.append(
            Suggestion(one.name, label, one.help + also, key_names(one.shown_key), one.aliases, bool(one.takes))
        )
    return rows


class Completions:
    """Finds suggestions. `themes` returns the names of the themes, and `title` the title of the open chat."""

    def __init__(self, client: Client, themes: Callable[[], Iterable[str]], title: Callable[[], str]) -> None:
        self._client = client
        self._themes = themes
        self._title = title
        self._lists: dict[tuple[str, str], asyncio.Future[Sequence[Suggestion]]] = {}  # by source and folder
        self._sources: Mapping[str, Callable[[str], Awaitable[Sequence[Suggestion]]]] = {
            "commands": self._commands,
            "models": self._models,
            "presets": self._presets,
            "parameters": self._parameters,
            "themes": self._theme_names,
            "files": self._files,
            "new files": self._files,
            "imports": self._imports,
            "@files": self._files,
            "exports": self._exports,
        }

    async def suggest(self, request: Request) -> list[Suggestion]:
        """Return the suggestions that match the query, best first, and a note if the list is incomplete.

        Each list is read once until `forget` is called. It is empty if its source fails.
        """
        folder = folder_of(request.query) if request.source in _FILES else ""
        key = (request.source, folder)
        if key not in self._lists:
            self._lists[key] = asyncio.ensure_future(self._read(*key))
        found = await asyncio.shield(self._lists[key])  # the next key cancels this call, but not the read
        start = request.query.removeprefix(folder)
        rows = [one for one in found if not one.is_note and (start[:1] == "." or not _is_hidden(one.name, folder))]
        return [*match(request.query, rows), *(one for one in found if one.is_note)]

    def forget(self) -> None:
        """Read all lists again when they are needed next."""
        self._lists.clear()

    async def _read(self, source: str, folder: str) -> Sequence[Suggestion]:
        try:
            return await self._sources[source](folder)
        except ClientError:
            return []

    async def _commands(self, _: str) -> Sequence[Suggestion]:
        return command_suggestions()

    async def _models(self, _: str) -> Sequence[Suggestion]:
        installed, catalog = await asyncio.gather(self._client.models.installed(), self._client.models.catalog())
        models = {one.name: one for one in (*catalog, *installed)}
        order = sorted(models.values(), key=lambda one: not can_load(one))
        return [Suggestion(one.name, one.name, _describe(one)) for one in order]

    async def _presets(self, _: str) -> Sequence[Suggestion]:
        presets = await self._client.chats.presets()
        found = [Suggestion(one.name, single_line(one.name), single_line(one.settings.system)) for one in presets]
        return [*found, Suggestion(NO_PRESET, NO_PRESET, "The settings of the model")]

    async def _parameters(self, _: str) -> Sequence[Suggestion]:
        return [
            Suggestion(one.name, one.name, f"{one.label}, {one.least:g} to {one.most:g}", takes_more=True)
            for one in sampling_fields.FIELDS
        ]

    async def _theme_names(self, _: str) -> Sequence[Suggestion]:
        from tui.themes import ordered

        return [Suggestion(name, name) for name in ordered(self._themes())]

    async def _files(self, folder: str) -> Sequence[Suggestion]:
        from tui.file_search import find_files

        files = await asyncio.to_thread(find_files, folder, Path())
        notes = [Suggestion("", _CUT.format(len(files.names)), is_note=True)] if files.is_cut else []
        texts = [name for name in files.names if not _NOT_TEXT.search(name)]
        return [*(Suggestion(name, single_line(name)) for name in texts), *notes]

    async def _imports(self, folder: str) -> Sequence[Suggestion]:
        return [one for one in await self._files(folder) if one.is_note or one.name.endswith((".json", "/"))]

    async def _exports(self, _: str) -> Sequence[Suggestion]:
        stem = file_stem(self._title())
        kinds = ((".md", "This branch, as Markdown"), (".json", "All branches"))
        return [Suggestion(stem + suffix, stem + suffix, about) for suffix, about in kinds]


def _describe(model: ModelInfo) -> str:
    """Return the size of a model, and whether it must be downloaded or is too large."""
    size = figures.approximate_size(model.size, is_estimate=model.is_estimate)
    state = "" if can_load(model) else "too large" if model.fits is False else "download"
    return f"{size}  {state}".strip()


def _is_hidden(name: str, folder: str) -> bool:
    return bool(folder) and name.removeprefix(folder).startswith(".")


def match(query: str, suggestions: Sequence[Suggestion]) -> list[Suggestion]:
    """Return the suggestions that match, best first. Without a query, return the first ones in their order."""
    names = operator.attrgetter("names")
    return fuzzy.rank(query, suggestions, names, _MOST) if query else [*suggestions[:_MOST]]
