"""An MCP server for tests. Without an argument it behaves well; an argument names its fault.

It uses only the standard library, because an import of the `mcp` package takes a second.

https://modelcontextprotocol.io/specification/2025-11-25/server/tools
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

NO_METHOD = -32601  # error code of JSON-RPC

Result = dict[str, Any]


def text(value: str, *, is_error: bool = False) -> Result:
    return {"content": [{"type": "text", "text": value}], "isError": is_error}


def die() -> Result:
    sys.stderr.write("out of coffee\n")
    sys.stderr.flush()
    os._exit(3)


def write_endlessly(piece: bytes) -> None:
    while True:
        os.write(1, piece)


def flood() -> None:
    """Write one line endlessly, without a newline."""
    write_endlessly(b"x" * 65536)


def chatter() -> None:
    """Write notifications endlessly."""
    write_endlessly(b'{"jsonrpc":"2.0","method":"notifications/message","params":{"level":"info","data":1}}\n' * 500)


def sleep() -> None:
    """Never answer."""


INTEGERS = {"type": "object", "properties": {name: {"type": "integer"} for name in "ab"}, "required": ["a", "b"]}

TOOLS: dict[str, Callable[..., Result | None]] = {
    "add": lambda a, b: text(str(a + b)),
    "fail": lambda: text("the disk is full", is_error=True),
    "long": lambda: text("x" * 300_000),
    "environment": lambda: text(" ".join(sorted(os.environ))),
    "die": die,
    "sleep": sleep,
    "flood": flood,
    "chatter": chatter,
}


def initialize(_: Result) -> Result:
    return {
        "protocolVersion": "2025-11-25",
        "capabilities": {"tools": {}},
        "serverInfo": {"name": "test", "version": "1"},
    }


def list_tools(_: Result) -> Result:
    tools = [
        {"name": name, "description": "A tool.", "inputSchema": INTEGERS if name == "add" else {"type": "object"}}
        for name in TOOLS
    ]
    if "huge" in sys.argv:
        tools += [
            {"name": f"tool_{number}", "description": "d" * 10_000, "inputSchema": INTEGERS} for number in range(300)
        ]
    return {"tools": tools}


def call_tool(params: Result) -> Result | None:
    try:
        return TOOLS[params["name"]](**params["arguments"])
    except TypeError as problem:
        return text(f"Error executing tool {params['name']}: {problem}", is_error=True)


METHODS: dict[str, Callable[[Result], Result | None]] = {
    "initialize": initialize,
    "tools/list": list_tools,
    "tools/call": call_tool,
    "ping": lambda _: {},
}


def serve() -> None:
    """Answer the requests on standard input, one after the other. Notifications have no id."""
    for line in sys.stdin:
        request = json.loads(line)
        if "id" not in request:
            continue
        answer: Result = {"jsonrpc": "2.0", "id": request["id"]}
        if request["method"] not in METHODS:
            answer["error"] = {"code": NO_METHOD, "message": "Method not found"}
        elif (result := METHODS[request["method"]](request.get("params") or {})) is not None:
            answer["result"] = result
        else:
            continue
        print(json.dumps(answer), flush=True)


if "silent" in sys.argv:
    sys.stdin.read()
if "endless" in sys.argv:
    flood()
if "broken" in sys.argv:
    sys.exit("the license has expired")
if "garbage" in sys.argv:
    os.write(1, b"this is no JSON\n{]\n\xff\xfe\n" * 10)
serve()
