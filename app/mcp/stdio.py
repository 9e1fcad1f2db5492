"""The stdio transport of MCP, with limits on the data that a server may send.

The transport of the `mcp` package collects a line of any length in memory. This one ends the server if a line, or the
data that arrives between two messages to the server, exceeds a limit. The end of the server's standard error is kept
for error messages.

https://modelcontextprotocol.io/specification/2025-11-25/basic/transports#stdio
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncGenerator, Coroutine
from typing import TYPE_CHECKING

import anyio
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage
from mcp_types import jsonrpc_message_adapter

from app.mcp.config import StdioServer

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
    from mcp.client._transport import TransportStreams

MAX_LINE = 4 << 20  # bytes in one message
MAX_UNSOLICITED = 16 << 20  # bytes that arrive between two messages to the server
MAX_MESSAGES = 5_000  # messages that arrive between two messages to the server
MAX_ERRORS = 4 << 10  # bytes of standard error that are kept
_KILL = signal.SIGTERM if sys.platform == "win32" else signal.SIGKILL
EXIT_SECONDS = 2.0  # seconds for a server to exit after its input is closed, and again after SIGTERM


@contextlib.asynccontextmanager
async def limited_stdio(server: StdioServer, errors: bytearray) -> "AsyncGenerator[TransportStreams, None]":
    """Start `server` and connect to it. `errors` receives the last MAX_ERRORS bytes of its standard error.

    Raises OSError if the command cannot be started.
    """
    process = await _start(server)
    sender, received = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    to_send, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
    pipes = _Pipes(process)
    tasks = [asyncio.ensure_future(work) for work in (pipes.read(sender), pipes.write(outgoing), pipes.keep(errors))]
    try:
        yield received, to_send
    finally:
        with anyio.CancelScope(shield=True):
            received.close()
            to_send.close()
            await _completed(_stop(process))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _start(server: StdioServer) -> asyncio.subprocess.Process:
    """Start the process. A cancellation waits for the start, so that the process and its pipes are closed."""
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            server.command,
            *server.arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**get_default_environment(), **(server.environment or {})},
            cwd=server.folder,
            limit=MAX_LINE,
            # a new process group, so that one signal reaches the children as well
            start_new_session=sys.platform != "win32",
        )
    )
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        with contextlib.suppress(OSError):
            await _completed(_stop(await starting))
        raise


class _Pipes:
    """Passes messages between the streams of a session and the pipes of a process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        if process.stdin is None or process.stdout is None or process.stderr is None:
            raise TypeError("the process was started without pipes")
        self._stdin, self._stdout, self._stderr = process.stdin, process.stdout, process.stderr
        self._unsolicited, self._num_messages = 0, 0  # bytes and messages received since the last message to the server

    async def read(self, sender: "MemoryObjectSendStream[SessionMessage | Exception]") -> None:
        """Pass each line to the session. The session's stream ends when the server ends or exceeds a limit."""
        async with sender:
            with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, ValueError, OSError):
                # readline raises ValueError for a line longer than MAX_LINE
                while line := await self._stdout.readline():
                    self._unsolicited += len(line)
                    self._num_messages += 1
                    if self._unsolicited > MAX_UNSOLICITED or self._num_messages > MAX_MESSAGES:
                        return
                    if line.strip():
                        await sender.send(_message(line))

    async def write(self, outgoing: "MemoryObjectReceiveStream[SessionMessage]") -> None:
        async with outgoing:
            with contextlib.suppress(OSError):
                async for message in outgoing:
                    self._unsolicited, self._num_messages = 0, 0
                    self._stdin.write(
                        message.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n"
                    )
                    await self._stdin.drain()

    async def keep(self, errors: bytearray) -> None:
        while piece := await self._stderr.read(MAX_ERRORS):
            errors += piece
            del errors[:-MAX_ERRORS]


def _message(line: bytes) -> SessionMessage | Exception:
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError as problem:
        return problem


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Close the input of the process, then terminate it, then kill it, with its children."""
    if process.stdin is not None:
        process.stdin.close()
    for number in (signal.SIGTERM, _KILL):
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(_exit(process), EXIT_SECONDS)
            break
        _send_signal(process, number)
    _send_signal(process, _KILL)  # kills children that still run
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(_exit(process), EXIT_SECONDS)
    process._transport.close()  # type: ignore[attr-defined]  # a child may hold the pipe open


async def _completed(work: Coroutine[object, object, None]) -> None:
    """Wait for `work` even if this task is cancelled meanwhile, and raise the cancellation afterwards.

    A server can be closed while its task already stops the process.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as problem:
            cancelled = problem
    if cancelled is not None:
        raise cancelled


async def _exit(process: asyncio.subprocess.Process) -> None:
    """Wait until the process itself ends. `process.wait` would also wait for the end of its pipes."""
    while process.returncode is None:
        await asyncio.sleep(0.01)


def _send_signal(process: asyncio.subprocess.Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if sys.platform == "win32":
            if process.returncode is None:
                process.terminate()
        else:
            os.killpg(process.pid, number)
