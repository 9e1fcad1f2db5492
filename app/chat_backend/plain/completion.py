"""Completion of commands and their arguments in the plain chat."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from app.chat_backend.plain import settings, tools, trimming
from tui.client import Client, ClientError
from tui.commands import Command, find_command

_SECONDS = 2.0  # time limit for a request to the client
_MAX_PATHS = 200


class Completion:
    """Completes whole lines. `complete` runs on the thread that reads lines."""

    def __init__(self, client: Client, commands: Sequence[Command], loop: asyncio.AbstractEventLoop) -> None:
        self._client = client
        self._commands = {command.name: command for command in commands}
        self._loop = loop
        self._names: Mapping[str, Callable[[], Awaitable[Sequence[str]]]] = {
            "preset": self._presets,
            "load": self._models,
            "tools": self._tools,
        }
        choices = tuple(trimming.CHOICES)
        self._words: Mapping[str, Sequence[str]] = {"set": settings.NAMES, "room": choices, "models": ("catalog",)}

    def complete(self, line: str) -> Sequence[str]:
        """Return the completions of `line`, each as a whole line."""
        if not line.startswith("/") or "\n" in line:
            return ()
        name, space, argument = line[1:].partition(" ")
        if not space:
            return [f"/{command} " for command in sorted(self._commands) if command.startswith(name)]
        found = find_command(name)
        of = found.name if found is not None else name
        return [f"/{name} {one}" for one in self._arguments(of, argument) if one.startswith(argument)]

    def _arguments(self, name: str, argument: str) -> Sequence[str]:
        if name in self._words:
            return self._words[name]
        if name in self._names:
            return self._ask(self._names[name])
        command = self._commands.get(name)
        return _paths(argument) if command is not None and command.takes == "PATH" else ()

    def _ask(self, names: Callable[[], Awaitable[Sequence[str]]]) -> Sequence[str]:
        async def find() -> Sequence[str]:
            async with asyncio.timeout(_SECONDS):
                return await names()

        with suppress(ClientError, TimeoutError, RuntimeError):  # RuntimeError: the event loop is closed
            return asyncio.run_coroutine_threadsafe(find(), self._loop).result(2 * _SECONDS)
        return ()

    async def _presets(self) -> Sequence[str]:
        return [preset.name for preset in await self._client.chats.presets()]

    async def _models(self) -> Sequence[str]:
        models = self._client.models
        return [model.name for model in [*await models.installed(), *await models.catalog()]]

    async def _tools(self) -> Sequence[str]:
        servers = await self._client.tools.servers()
        names = [tool.name for server in servers for tool in server.tools]
        found = [f"{verb} {name}" for verb in tools.TOOL_VERBS for name in names]
        return [*found, *(f"restart {server.name}" for server in servers)]


def _paths(typed: str) -> Sequence[str]:
    """Return the paths that start with `typed`. Folders end with a slash."""
    start = typed.rpartition("/")[2]
    prefix = typed[: len(typed) - len(start)]
    try:
        found = sorted(Path(os.path.expanduser(prefix or ".")).iterdir())
        named = [one for one in found if one.name.startswith(start) and (start or not one.name.startswith("."))]
        return [f"{prefix}{one.name}{'/' * one.is_dir()}" for one in named[:_MAX_PATHS]]
    except OSError:
        return ()
