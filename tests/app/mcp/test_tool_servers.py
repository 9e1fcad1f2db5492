"""Several tool servers at once."""

import asyncio
import sys

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
