"""The tool servers of the chat: starts them ahead of time, and reports those that fail."""

import asyncio
from collections.abc import Callable, Sequence

from tui.client import Tools
from tui.types import ToolServer

_POLL_SECONDS = 0.5  # seconds between two polls of servers that are starting


def count_active(servers: Sequence[ToolServer], disabled: frozenset[str]) -> str:
    """Return "5 of 7 tools active in this chat"; empty if there are no servers."""
    if not servers:
        return ""
    names = {tool.name for server in servers for tool in server.tools}
    return f"{len(names - disabled)} of {len(names)} tools active in this chat"


class ToolServers:
    """The servers as they were when they were last polled."""

    def __init__(self, tools: Tools, report_failure: Callable[[ToolServer], None]) -> None:
        """`report_failure` is called once for each server that has failed."""
        self._tools = tools
        self._report_failure = report_failure
        self.found: Sequence[ToolServer] = ()

    async def start(self) -> None:
        """Start the servers, so that the first message does not wait for them. Raises ClientError."""
        known = {server.name for server in self.found if server.state == "failed"}
        self.found = await self._tools.servers()
        while any(server.state == "starting" for server in self.found):
            await asyncio.sleep(_POLL_SECONDS)
            self.found = await self._tools.servers()
        for server in self.found:
            if server.state == "failed" and server.name not in known:
                self._report_failure(server)
