"""Tool calls in the plain chat: prints one line for each call, asks for permission, and runs the command /tools."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from shutil import get_terminal_size

from tui.client import Client, ClientError
from tui.types import Chat, Permission, ToolCalled, ToolReturned, ToolServer

_LONGEST = 200  # maximum length in characters of arguments or of a result in a line
_WIDEST = 300  # maximum length of a line in characters if the output is not a terminal
_MARKS = {False: "", True: ", always allowed"}

TOOL_VERBS = ("on", "off", "revoke")  # each is followed by the name of a tool
QUESTION = "Allow this call? y: once, chat: in this chat, always: in all chats, N: no"
_PERMISSIONS = {
    "y": Permission.ONCE,
    "yes": Permission.ONCE,
    "chat": Permission.CHAT,
    "always": Permission.ALWAYS,
}


def permission(answer: str) -> Permission:
    """Return the permission that the user's answer gives. Unknown answers deny the call."""
    return _PERMISSIONS.get(answer.strip().lower(), Permission.DENY)


def call_line(call: ToolCalled) -> str:
    return f"Tool: {call.name} {_short(call.arguments)}".rstrip()


def result_line(returned: ToolReturned) -> str:
    return f"{'Tool failed' if returned.is_error else 'Result'}: {_short(returned.result) or 'empty'}"


def _short(text: str) -> str:
    """Return the start of a text as one line."""
    line = " ".join(text[: 2 * _LONGEST].split())
    if len(line) <= _LONGEST and len(text) <= 2 * _LONGEST:
        return line
    return f"{line[:_LONGEST]} … ({len(text):,} characters)"


def _server_line(server: ToolServer) -> str:
    left_out = f", {server.left_out} tools left out" if server.left_out else ""
    return f"{server.name}: {server.state}{': ' * bool(server.reason)}{server.reason}{left_out}"


class PlainTools:
    """Runs the command /tools. `say` writes a line."""

    def __init__(self, client: Client, say: Callable[[str], None], current: Callable[[], Awaitable[Chat]]) -> None:
        self._client = client
        self._say = say
        self._current = current

    async def do(self, rest: str) -> None:
        """List servers and tools, switch a tool on or off, revoke its permission, or restart a server."""
        verb, _, name = rest.partition(" ")
        actions = {"": self._list, "on": self._on, "off": self._off, "revoke": self._revoke, "restart": self._restart}
        if verb not in actions or bool(verb) != bool(name.strip()):
            raise ClientError(
                "invalid arguments of /tools", "Use /tools, or /tools on, off, revoke, or restart with a NAME."
            )
        await actions[verb](name.strip())

    async def _list(self, _: str) -> None:
        disabled = (await self._current()).settings.disabled_tools
        servers = await self._client.tools.servers()
        width = get_terminal_size((_WIDEST, 0)).columns
        for server in servers:
            self._say(_server_line(server))
            for tool in server.tools:
                state = "off" if tool.name in disabled else "on"
                line = f"  {tool.name}: {state}{_MARKS[tool.is_always_allowed]}. {_short(tool.description)}".rstrip()
                self._say(line if len(line) <= width else f"{line[: width - 1]}…")
        if not servers:
            self._say("No tool servers.")
        self._say(f"Tool servers are configured in {' and '.join(map(str, self._client.tools.config_paths()))}.")

    async def _on(self, name: str) -> None:
        await self._switch(name, is_on=True)

    async def _off(self, name: str) -> None:
        await self._switch(name, is_on=False)

    async def _switch(self, name: str, *, is_on: bool) -> None:
        await self._check_tool(name)
        chat = await self._current()
        disabled = chat.settings.disabled_tools - {name} if is_on else chat.settings.disabled_tools | {name}
        await self._client.chats.configure(chat.summary.id, replace(chat.settings, disabled_tools=disabled))
        self._say(f"{name}: {'on' if is_on else 'off'} in this chat.")

    async def _revoke(self, name: str) -> None:
        await self._client.tools.revoke(name)
        self._say(f"{name}: asks before each call.")

    async def _restart(self, name: str) -> None:
        if name not in [server.name for server in await self._client.tools.servers()]:
            raise ClientError(f"there is no tool server {name}", "/tools lists them.")
        await self._client.tools.restart(name)
        for server in await self._client.tools.servers():
            if server.name == name:
                self._say(_server_line(server))

    async def _check_tool(self, name: str) -> None:
        """Raise ClientError if no server has the tool."""
        if not any(tool.name == name for server in await self._client.tools.servers() for tool in server.tools):
            raise ClientError(f"there is no tool {name}", "/tools lists them.")
