"""Calls to real MCP servers in child processes, both well-behaved and hostile ones."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from app.mcp import server as server_module
from app.mcp import stdio
from app.mcp.config import ServerSpec, StdioServer
from app.mcp.server import MCPServer, ServerState
from app.mcp.tools import MAX_DESCRIPTION, MAX_RESULT

PROGRAM = str(Path(__file__).with_name("server_program.py"))
PACKAGED = str(Path(__file__).with_name("packaged_program.py"))


@asynccontextmanager
async def running(*arguments: str, command: str = sys.executable, program: str = PROGRAM) -> AsyncIterator[MCPServer]:
    server = MCPServer(ServerSpec("test", StdioServer(command, (program, *arguments))))
    server.start()
    await server.settled()
    try:
        yield server
    finally:
        await server.close()


def test_tools_are_listed_and_called() -> None:
    async def scenario() -> None:
        async with running(program=PACKAGED) as server:
            assert server.state is ServerState.READY
            assert {"add", "fail"} <= {tool.name for tool in server.tools}
            result = await server.call("add", {"a": 2, "b": 3})
            assert (result.text, result.is_error) == ("5", False)

    asyncio.run(scenario())


def test_error_of_a_tool_is_a_result() -> None:
    async def scenario() -> None:
        async with running(program=PACKAGED) as server:
            result = await server.call("fail", {})
            assert result.is_error
            assert "the disk is full" in result.text
            wrong = await server.call("add", {"a": "x"})
            assert wrong.is_error
            assert (await server.call("add", {"a": 1, "b": 1})).text == "2"

    asyncio.run(scenario())


def test_long_result_is_cut() -> None:
    async def scenario() -> None:
        async with running() as server:
            result = await server.call("long", {})
            assert (len(result.text), result.left_out) == (MAX_RESULT, 300_000 - MAX_RESULT)

    asyncio.run(scenario())


def test_server_receives_no_secrets_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")

    async def scenario() -> None:
        async with running() as server:
            assert "OPENAI_API_KEY" not in (await server.call("environment", {})).text.split()

    asyncio.run(scenario())


@pytest.mark.parametrize("tool", ["die", "flood", "chatter"])
def test_server_that_dies_or_floods_fails_the_call(tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stdio, "EXIT_SECONDS", 0.1)

    async def scenario() -> None:
        async with running() as server:
            result = await server.call(tool, {})
            assert result.is_error
            while server.state is ServerState.READY:
                await asyncio.sleep(0.01)
            assert server.state is ServerState.FAILED
            assert tool != "die" or "out of coffee" in server.reason
            again = await server.call("add", {"a": 1, "b": 1})
            assert again.is_error
            server.start()
            await server.settled()
            assert (await server.call("add", {"a": 1, "b": 1})).text == "2"

    asyncio.run(scenario())


def test_call_without_an_answer_ends_after_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "CALL_SECONDS", 0.2)

    async def scenario() -> None:
        async with running() as server:
            result = await server.call("sleep", {})
            assert result.is_error
            assert "did not answer" in result.text
            monkeypatch.setattr(server_module, "CALL_SECONDS", 60.0)
            assert (await server.call("add", {"a": 1, "b": 1})).text == "2"

    asyncio.run(scenario())


def test_cancelled_call_leaves_the_server_usable() -> None:
    async def scenario() -> None:
        async with running() as server:
            call = asyncio.create_task(server.call("sleep", {}))
            await asyncio.sleep(0.1)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            assert (await server.call("add", {"a": 1, "b": 1})).text == "2"

    asyncio.run(scenario())


def test_huge_tool_lists_are_cut() -> None:
    async def scenario() -> None:
        async with running("huge") as server:
            assert server.state is ServerState.READY
            assert len(server.tools) == server_module.MAX_TOOLS
            assert server.num_left_out > 0
            assert max(len(tool.description) for tool in server.tools) == MAX_DESCRIPTION

    asyncio.run(scenario())


def test_invalid_json_before_the_handshake_is_skipped() -> None:
    async def scenario() -> None:
        async with running("garbage") as server:
            assert (await server.call("add", {"a": 1, "b": 1})).text == "2"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("fault", "limit", "reason"),
    [("silent", 0.2, "did not answer"), ("endless", 60.0, ""), ("broken", 60.0, "license has expired")],
)
def test_server_that_never_answers_fails(
    fault: str, limit: float, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "CONNECT_SECONDS", limit)
    monkeypatch.setattr(stdio, "EXIT_SECONDS", 0.1)

    async def scenario() -> None:
        async with running(fault) as server:
            assert server.state is ServerState.FAILED
            assert server.reason
            assert reason in server.reason

    asyncio.run(scenario())


def test_error_names_the_missing_command() -> None:
    async def scenario() -> None:
        async with running(command="no-such-command") as server:
            assert server.state is ServerState.FAILED
            assert "no-such-command" in server.reason

    asyncio.run(scenario())


def test_children_of_a_server_end_with_it(tmp_path: Path) -> None:
    marker = tmp_path / "child"
    script = f"sleep 1000 & echo $! > {marker}; exec {sys.executable} {PROGRAM}"

    async def scenario() -> int:
        server = MCPServer(ServerSpec("test", StdioServer("sh", ("-c", script))))
        server.start()
        await server.settled()
        assert server.state is ServerState.READY, server.reason
        await server.close()
        return int(marker.read_text())

    child = asyncio.run(scenario())
    while _is_running(child):
        time.sleep(0.01)


def _is_running(process: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False
