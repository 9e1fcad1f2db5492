"""All tool servers of mcp.json, and their tools."""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

from app.mcp.config import ServerSpec
from app.mcp.server import MCPServer, ServerState
from app.mcp.tools import Tool, ToolResult

READY_SECONDS = 10.0  # seconds from the start of a server for which replies wait for it


class ToolServers:
    """The tool servers. All of them start in the background when a caller first asks for tools."""

    def __init__(self, specs: Sequence[ServerSpec]) -> None:
        self.servers = [MCPServer(spec) for spec in specs]

    def start(self) -> None:
        """Connect to each enabled server that is not running."""
        for server in self.servers:
            if server.spec.is_enabled:
                server.start()

    async def tools(self) -> list[Tool]:
        """Return the tools of all servers that are ready. Their qualified names are unique.

        Waits for servers that are starting, until READY_SECONDS after their start. Servers that were ready and have
        ended are started again. The user must restart servers that failed to start.
        """
        for server in self.servers:
            if server.spec.is_enabled and (server.was_ready or server.state is not ServerState.FAILED):
                server.start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(READY_SECONDS + max((one.started_at for one in self.servers), default=0.0)):
                await asyncio.gather(*(server.settled() for server in self.servers))
        named: dict[str, Tool] = {}
        for server in self.servers:
            if server.state is ServerState.READY:
                for tool in server.tools:
                    named.setdefault(tool.qualified_name, tool)
        return list(named.values())

    async def call(self, tool: Tool, arguments: dict[str, Any]) -> ToolResult:
        for server in self.servers:
            if server.spec.name == tool.server:
                return await server.call(tool.name, arguments)
        return ToolResult.of(f"There is no tool server {tool.server}.", is_error=True)

    async def close(self) -> None:
        await asyncio.gather(*(server.close() for server in self.servers))
