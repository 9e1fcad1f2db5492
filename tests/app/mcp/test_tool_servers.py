"""The tools of several MCP servers that run at the same time."""

import asyncio
import sys
import time

import pytest

from app.mcp import tool_servers
from app.mcp.config import ServerSpec, StdioServer
from app.mcp.server import ServerState
from app.mcp.tool_servers import ToolServers
from tests.app.mcp.test_server import PROGRAM


def test_tools_of_the_servers_that_work_are_offered() -> None:
    async def scenario() -> None:
        servers = ToolServers(
            [
                ServerSpec("one", StdioServer(sys.executable, (PROGRAM,))),
                ServerSpec("broken", StdioServer(sys.executable, (PROGRAM, "broken"))),
                ServerSpec("off", StdioServer("no-such-command"), is_enabled=False),
            ]
        )
        try:
            tools = {tool.qualified_name: tool for tool in await servers.tools()}
            assert "one__add" in tools
            assert {server.spec.name: server.state for server in servers.servers} == {
                "one": ServerState.READY,
                "broken": ServerState.FAILED,
                "off": ServerState.DISABLED,
            }
            assert (await servers.call(tools["one__add"], {"a": 20, "b": 3})).text == "23"
        finally:
            await servers.close()

    asyncio.run(scenario())


def test_silent_server_delays_only_the_first_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_servers, "READY_SECONDS", 1.0)

    async def scenario() -> None:
        servers = ToolServers([ServerSpec("silent", StdioServer(sys.executable, (PROGRAM, "silent")))])
        try:
            assert await servers.tools() == []
            begun = time.monotonic()
            for _ in range(3):
                assert await servers.tools() == []
            assert time.monotonic() - begun < 1
            assert servers.servers[0].state is ServerState.STARTING
        finally:
            await servers.close()

    asyncio.run(scenario())


def test_broken_server_is_not_started_again_by_replies() -> None:
    async def scenario() -> None:
        servers = ToolServers([ServerSpec("broken", StdioServer(sys.executable, (PROGRAM, "broken")))])
        try:
            await servers.tools()
            begun = servers.servers[0].started_at
            await servers.tools()
            assert (servers.servers[0].started_at, servers.servers[0].state) == (begun, ServerState.FAILED)
        finally:
            await servers.close()

    asyncio.run(scenario())
