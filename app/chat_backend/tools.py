"""Tools of MCP servers in the chat: offers them to the model, asks for permission, and runs calls."""

import asyncio
import difflib
import os
from collections.abc import AsyncGenerator, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from app.chat_backend.client_errors import client_errors, to_thread
from app.chat_backend.reply_parts import Call
from app.generation.conversation import parse_arguments
from app.mcp.config import mcp_config_file, read_mcp_config
from app.whole_file import write_whole
from engine.private_folder import private_folder
from tui import types
from tui.client import ClientError

if TYPE_CHECKING:
    from app.mcp.tool_servers import ToolServers
    from app.mcp.tools import Tool, ToolResult

_ALLOWED_FILE = "allowed-tools.json"  # name of the file in the state folder
_PRIVATE = 0o600
_DENIED = "The user did not allow this call."


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The last event of a tool call."""

    result: str
    is_error: bool


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """The tools that a chat offers to the model, by qualified name."""

    by_name: "Mapping[str, Tool]"

    def field(self) -> dict[str, object]:
        """Return the `tools` field of a request; an empty dict if there are no tools."""
        return {"tools": [tool.as_openai() for tool in self.by_name.values()]} if self.by_name else {}

    def unknown(self, name: str) -> str:
        """Return an error for a call of a tool that is not offered, with similar names for the model to try."""
        similar = [known for known in self.by_name if known.endswith(f"__{name}")]
        similar = similar or difflib.get_close_matches(name, self.by_name, n=3)
        return f"There is no tool {name}." + (f" Similar tools: {', '.join(similar)}." if similar else "")


class ChatTools:
    """Implements `tui.client.Tools`, and calls tools for `ChatReplies`."""

    def __init__(self, state_folder: Path, more_config: Path | None = None) -> None:
        """`more_config` is a file like mcp.json, whose servers are added."""
        self._more_config = more_config
        self._allowed_path = state_folder / _ALLOWED_FILE
        self._servers: ToolServers | None = None
        self._changing = asyncio.Lock()  # held while the tool servers are replaced
        self._config: bytes = b""  # content of mcp.json when the servers were created
        self._always: set[str] | None = None  # None: not read yet
        self._in_chat: set[tuple[types.ChatId, str]] = set()
        self._asking: dict[types.CallId, asyncio.Future[types.Permission]] = {}
        self._num_calls = 0

    def config_paths(self) -> Sequence[Path]:
        return [mcp_config_file(), *([self._more_config] if self._more_config else [])]

    async def servers(self) -> Sequence[types.ToolServer]:
        servers = await self._current()
        always = await self._always_allowed()
        return [
            types.ToolServer(
                server.spec.name,
                server.state.value,
                server.reason,
                tuple(
                    types.ToolInfo(tool.qualified_name, tool.description, tool.qualified_name in always)
                    for tool in server.tools
                ),
                server.num_left_out,
            )
            for server in (servers.servers if servers else ())
        ]

    async def restart(self, server: str) -> None:
        servers = await self._current()
        for one in servers.servers if servers else ():
            if one.spec.name == server:
                one.start()
                await one.settled()

    def answer(self, call: types.CallId, permission: types.Permission) -> None:
        if (asking := self._asking.get(call)) is not None and not asking.done():
            asking.set_result(permission)

    async def revoke(self, tool: str) -> None:
        always = await self._always_allowed()
        always.discard(tool)
        await to_thread(self._write_allowed, always)

    async def offered(self, disabled: Container[str]) -> OfferedTools:
        """Return the tools for a chat, once each server is ready or has failed.

        If mcp.json is invalid, no tools are offered; `servers` reports the error.
        """
        try:
            servers = await self._current()
        except ClientError:
            return OfferedTools({})
        tools = await servers.tools() if servers else []
        return OfferedTools({tool.qualified_name: tool for tool in tools if tool.qualified_name not in disabled})

    async def run(
        self, chat: types.ChatId, call: Call, offered: OfferedTools
    ) -> AsyncGenerator[types.ReplyEvent | CallEnded, None]:
        """Yield the events of a tool call; the last is CallEnded. Asks the user unless the tool is already allowed."""
        self._num_calls += 1
        number = types.CallId(str(self._num_calls))
        asks = call.name in offered.by_name and not await self._is_allowed(chat, call.name)
        asking = self._asking[number] = asyncio.get_running_loop().create_future()
        try:
            yield types.ToolCalled(number, call.name, call.arguments, asks)
            permission = await asking if asks else types.Permission.ONCE
        finally:
            del self._asking[number]
        await self._remember(chat, call.name, permission)
        result = await self._result(offered, call, permission)
        yield types.ToolReturned(number, result.complete_text, result.is_error)
        yield CallEnded(result.complete_text, result.is_error)

    async def _result(self, offered: OfferedTools, call: Call, permission: types.Permission) -> "ToolResult":
        """Run the call and return its result, or an error result that says why it cannot run."""
        from app.mcp.tools import ToolResult

        tool = offered.by_name.get(call.name)
        if tool is None:
            return ToolResult.of(offered.unknown(call.name), is_error=True)
        if permission is types.Permission.DENY:
            return ToolResult.of(_DENIED, is_error=True)
        if self._servers is None:  # mcp.json was removed during the reply
            return ToolResult.of("The tool server was removed.", is_error=True)
        try:
            arguments = parse_arguments(call.arguments)
        except ValueError as problem:
            return ToolResult.of(f"The arguments are invalid: {problem}.", is_error=True)
        return await self._servers.call(tool, arguments)

    async def close(self) -> None:
        if self._servers is not None:
            await self._servers.close()

    async def _current(self) -> "ToolServers | None":
        """Return the servers of mcp.json. If the file has changed, replace the running servers with new ones.

        Without an mcp.json, returns None and does not import the `mcp` package.
        """
        async with self._changing:
            paths = self.config_paths()
            content = await to_thread(_content, paths)
            if content == self._config:
                return self._servers
            with client_errors():
                specs = {spec.name: spec for path in paths for spec in read_mcp_config(path, os.environ)}
            await self.close()
            from app.mcp.tool_servers import ToolServers

            self._servers, self._config = ToolServers(list(specs.values())), content
            self._servers.start()
            return self._servers

    async def _is_allowed(self, chat: types.ChatId, tool: str) -> bool:
        return (chat, tool) in self._in_chat or tool in await self._always_allowed()

    async def _remember(self, chat: types.ChatId, tool: str, permission: types.Permission) -> None:
        if permission is types.Permission.CHAT:
            self._in_chat.add((chat, tool))
        elif permission is types.Permission.ALWAYS:
            always = await self._always_allowed()
            always.add(tool)
            await to_thread(self._write_allowed, always)

    async def _always_allowed(self) -> set[str]:
        if self._always is None:
            self._always = await to_thread(self._read_allowed)
        return self._always

    def _read_allowed(self) -> set[str]:
        try:
            return msgspec.json.decode(self._allowed_path.read_bytes(), type=set[str])
        except (OSError, ValueError):  # the file is missing or damaged: ask again
            return set()

    def _write_allowed(self, allowed: set[str]) -> None:
        private_folder(self._allowed_path.parent)
        write_whole(self._allowed_path, msgspec.json.encode(sorted(allowed)), _PRIVATE)


def _content(paths: Sequence[Path]) -> bytes:
    """Return the content of the files that can be read; empty if there is none."""
    found = []
    for path in paths:
        with suppress(OSError):
            found.append(path.read_bytes())
    return b"\0".join(found)
