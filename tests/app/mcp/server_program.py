"""An MCP server for tests. Without an argument it behaves well; an argument names its fault."""

import asyncio
import os
import sys

PROTOCOL = os.dup(1)  # the MCP package redirects descriptor 1 to standard error while it serves

# these faults do not need the MCP package, whose import takes a second
if "silent" in sys.argv:
    sys.stdin.read()
if "endless" in sys.argv:
    while True:
        os.write(PROTOCOL, b"x" * 65536)
if "broken" in sys.argv:
    sys.exit("the license has expired")

# ruff: noqa: E402
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("test")


@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def fail() -> str:
    """Raise an error."""
    raise ToolError("the disk is full")


@server.tool()
def long() -> str:
    """Return a long text."""
    return "x" * 300_000


@server.tool()
def environment() -> str:
    """Return the names of the environment variables."""
    return " ".join(sorted(os.environ))


@server.tool()
def die() -> str:
    """End the process without an answer."""
    sys.stderr.write("out of coffee\n")
    sys.stderr.flush()
    os._exit(3)


@server.tool()
async def sleep() -> str:
    """Never return."""
    await asyncio.sleep(1000)
    return ""


@server.tool()
def flood() -> str:
    """Write one line endlessly, without a newline."""
    while True:
        os.write(PROTOCOL, b"x" * 65536)


@server.tool()
def chatter() -> str:
    """Write notifications endlessly."""
    while True:
        os.write(
            PROTOCOL, b'{"jsonrpc":"2.0","method":"notifications/message","params":{"level":"info","data":1}}\n' * 500
        )


def huge(a: int) -> str:
    return ""


if "huge" in sys.argv:
    huge.__doc__ = "x"
    for number in range(300):
        server.add_tool(huge, name=f"tool_{number}", description="d" * 10_000)
if "garbage" in sys.argv:
    os.write(1, b"this is no JSON\n{]\n\xff\xfe\n" * 10)
server.run()
