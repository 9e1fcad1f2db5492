"""One MCP server: its connection, its tools, and calls to them.

A task holds the connection, because the contexts of the `mcp` package must be exited by the task that entered them.
"""

import asyncio
import contextlib
import enum
import importlib
import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from app.errors import AppError
from app.mcp.config import HTTPServer, ServerSpec
from app.mcp.tools import MAX_DESCRIPTION, MAX_SCHEMA, Tool, ToolResult

if TYPE_CHECKING:
    from mcp.client import Client
    from mcp_types import CallToolResult

CONNECT_SECONDS = 60.0  # seconds; a first start may install packages
CALL_SECONDS = 120.0
MAX_TOOLS = 200  # limit of the tools of one server
MAX_PAGES = 20  # limit of the pages in a server's list of tools
MAX_REASON = 300  # longest error message, in characters

_CONNECTION_CLOSED = -32000  # error code of the mcp package


class MCPUnavailable(AppError):
    """The `mcp` package is not installed."""


class ServerState(enum.StrEnum):
    DISABLED = "disabled"
    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"


class MCPServer:
    """A server of mcp.json. `start` it, then `call` its tools; `close` it at the end."""

    def __init__(self, spec: ServerSpec) -> None:
        self.spec = spec
        self.state = ServerState.DISABLED
        self.tools: list[Tool] = []
        self.reason = ""  # why the server failed
        self.was_ready = False  # whether the server was ready at least once
        self.started_at = 0.0  # time of the last start, by the event loop's clock
        # tools left out because their schema is too large, or because the server has more than MAX_TOOLS
        self.num_left_out = 0
        self._task: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()  # set when the server is ready or has failed
        self._ended = asyncio.Event()  # set when the connection has closed
        self._client: Client | None = None

    def start(self) -> None:
        """Connect, in the background. A server that is starting or ready stays as it is."""
        if self._task is None or self._task.done():
            self.state, self.reason = ServerState.STARTING, ""
            self.started_at = asyncio.get_running_loop().time()
            self._settled.clear()
            self._ended.clear()
            self._task = asyncio.create_task(self._run())

    async def settled(self) -> None:
        """Wait until the server is ready or has failed."""
        if self._task is not None:
            await self._settled.wait()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.state, self.tools = ServerState.DISABLED, []

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Return the result of the tool `name`. Every failure is returned as an error result, which the model sees."""
        client, connection = self._client, self._task
        if client is None or connection is None:
            return ToolResult.of(f"The tool server {self.spec.name} is not running.", is_error=True)
        call = asyncio.ensure_future(client.call_tool(name, arguments))
        try:
            done, _ = await asyncio.wait({call, connection}, timeout=CALL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if call in done:
                return _result(call.result())
            if connection in done:
                return ToolResult.of(f"The tool server {self.spec.name} ended during the call.", is_error=True)
            return ToolResult.of(f"The tool did not answer within {CALL_SECONDS:.0f} s.", is_error=True)
        except Exception as problem:  # noqa: BLE001  # a server can provoke any error in the package
            if getattr(problem, "code", None) == _CONNECTION_CLOSED:
                self._ended.set()
            return ToolResult.of(_reason(problem), is_error=True)
        finally:
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    async def _run(self) -> None:
        """Hold the connection until it is closed or fails."""
        errors = bytearray()
        try:
            async with _connected(self.spec, errors) as client:
                self.tools = await self._list_tools(client)
                self._client, self.state, self.was_ready = client, ServerState.READY, True
                self._settled.set()
                await self._ended.wait()
            self.state, self.reason = ServerState.FAILED, "It ended. " + _last_line(errors)
        except Exception as problem:  # noqa: BLE001  # a server can provoke any error in the package
            self.state, self.reason = ServerState.FAILED, f"{_reason(problem)} {_last_line(errors)}".strip()
        finally:
            self._client, self.tools = None, []
            self._settled.set()

    async def _list_tools(self, client: "Client") -> list[Tool]:
        tools, cursor, listed = [], None, 0
        for _ in range(MAX_PAGES):
            page = await asyncio.wait_for(client.list_tools(cursor=cursor), CONNECT_SECONDS)
            listed += len(page.tools)
            tools += [
                Tool(self.spec.name, tool.name, (tool.description or "")[:MAX_DESCRIPTION], tool.input_schema)
                for tool in page.tools
                if len(json.dumps(tool.input_schema)) <= MAX_SCHEMA
            ]
            cursor = page.next_cursor
            if cursor is None or len(tools) >= MAX_TOOLS:
                break
        self.num_left_out = listed - len(tools[:MAX_TOOLS])
        return tools[:MAX_TOOLS]


@contextlib.asynccontextmanager
async def _connected(spec: ServerSpec, errors: bytearray) -> "AsyncIterator[Client]":
    """Yield a client that has completed its handshake. `errors` receives the end of the server's standard error.

    Raises MCPUnavailable, OSError, TimeoutError, and errors of the package.
    """
    try:
        # the import takes up to a second
        await asyncio.to_thread(importlib.import_module, "mcp.client.streamable_http")
        import httpx2
        from mcp.client import Client
        from mcp.client.streamable_http import streamable_http_client
    except ImportError as problem:
        raise MCPUnavailable("The mcp package is not installed", "pip install 'inglenook[mcp]'") from problem
    from app.mcp.stdio import limited_stdio

    async with contextlib.AsyncExitStack() as stack:
        if isinstance(spec.transport, HTTPServer):
            http = await stack.enter_async_context(
                httpx2.AsyncClient(headers=spec.transport.headers, timeout=CALL_SECONDS, trust_env=True)
            )
            transport = streamable_http_client(spec.transport.url, http_client=http)
        else:
            transport = limited_stdio(spec.transport, errors)
        client = Client(transport, cache=None)
        async with asyncio.timeout(CONNECT_SECONDS) as deadline:
            await stack.enter_async_context(client)
            deadline.reschedule(None)
        yield client


def _result(result: "CallToolResult") -> ToolResult:
    """Return the text of a result. Other content is named by type. A structured result without text becomes JSON."""
    parts = [getattr(part, "text", None) or f"[{part.type}]" for part in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    return ToolResult.of("\n".join(parts), is_error=result.is_error)


def _last_line(errors: bytearray) -> str:
    lines = errors.decode(errors="replace").strip().splitlines()
    return lines[-1][:MAX_REASON] if lines else ""


def _reason(problem: BaseException) -> str:
    """Return the reason for a failure as a sentence for the user. Exception groups are unwrapped first."""
    while isinstance(problem, BaseExceptionGroup):
        problem = problem.exceptions[0]
    match problem:
        case TimeoutError():
            return f"It did not answer within {CONNECT_SECONDS:.0f} s."
        case FileNotFoundError():
            return f"The command was not found: {problem.filename}."
        case AppError():
            return f"{problem.message}. {problem.remedy}".strip()
    return next(iter(str(problem).splitlines()), "")[:MAX_REASON] or type(problem).__name__
