"""Tests for tool calls in replies, with a real MCP server and an endpoint with prepared replies."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from app.chat_backend.client import TerminalClient
from app.chat_backend.engine.server import EngineServer
from app.history.history import History
from app.mcp import tool_servers
from app.mcp.config import ServerSpec
from app.mcp.tool_servers import ToolServers
from app.settings.settings import Settings
from tests.app.chat_backend.flows import run_unsaved
from tests.app.mcp.test_server import PROGRAM
from tests.support.fake_endpoint import FakeEndpoint, Piece
from tui.client import ClientError
from tui.types import (
    ChatId,
    ChatSettings,
    Finish,
    MessageId,
    Permission,
    ReplyEnd,
    ReplyEvent,
    TextDelta,
    ToolCalled,
    ToolReturned,
    ToolStep,
)


def call(name: str, arguments: str, index: int = 0) -> list[Piece]:
    """Return the chunks of a streamed tool call: its name, and its arguments in two chunks."""
    half = len(arguments) // 2
    functions: list[dict[str, Any]] = [{"name": name, "arguments": arguments[:half]}, {"arguments": arguments[half:]}]
    return [{"tool_calls": [{"index": index, "id": f"c{index}", "function": function}]} for function in functions]


ADD = call("test__add", '{"a": 2, "b": 3}')


@pytest.fixture(autouse=True)
def config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Write an mcp.json with the test server, and return its path."""
    file = tmp_path / "mcp.json"
    file.write_text(json.dumps({"mcpServers": {"test": {"command": sys.executable, "args": [PROGRAM]}}}))
    monkeypatch.setattr("app.chat_backend.tools.mcp_config_file", lambda: file)
    monkeypatch.setattr(tool_servers, "READY_SECONDS", 600.0)  # a busy machine takes long to start the server
    return file


@pytest.fixture
def endpoint() -> Iterator[FakeEndpoint]:
    with FakeEndpoint() as endpoint:
        yield endpoint


def run(settings: Settings, endpoint: FakeEndpoint, work: Callable[[TerminalClient], Awaitable[Any]]) -> Any:
    return run_unsaved(settings, work, endpoint.url, "secret")


async def new_chat(client: TerminalClient, settings: ChatSettings | None = None) -> tuple[ChatId, MessageId]:
    chat = (await client.chats.create(settings or ChatSettings())).summary.id
    return chat, (await client.chats.add(chat, None, "What is 2 + 3?")).id


async def replied(
    client: TerminalClient, chat: ChatId, to: MessageId, permission: Permission | None = Permission.ONCE
) -> list[ReplyEvent]:
    """Return the events of a reply. Each question about a call is answered with `permission`; None stops the reply."""
    received: list[ReplyEvent] = []
    async with aclosing(client.replies.reply(chat, to)) as events:
        async for event in events:
            received.append(event)
            if isinstance(event, ToolCalled) and event.asks:
                if permission is None:
                    stored = (await client.chats.open(chat)).messages[-1].id
                    asyncio.get_running_loop().create_task(client.replies.stop(stored))
                else:
                    client.tools.answer(event.call, permission)
    return received


def calls_of(events: list[ReplyEvent]) -> list[bool]:
    return [event.asks for event in events if isinstance(event, ToolCalled)]


def test_call_runs_after_the_user_allows_it(settings: Settings, endpoint: FakeEndpoint) -> None:
    endpoint.replies = [["Let me see. ", *ADD], ["It is ", "5."]]

    async def work(client: TerminalClient) -> None:
        chat, message = await new_chat(client)
        events = await replied(client, chat, message)
        [called] = [event for event in events if isinstance(event, ToolCalled)]
        assert (called.name, called.arguments, called.asks) == ("test__add", '{"a": 2, "b": 3}', True)
        [returned] = [event for event in events if isinstance(event, ToolReturned)]
        assert (returned.call, returned.result, returned.is_error) == (called.call, "5", False)
        assert isinstance(events[-1], ReplyEnd)
        assert events[-1].finish is Finish.COMPLETE
        reply = (await client.chats.open(chat)).messages[-1]
        assert reply.text == "It is 5."
        assert reply.steps == (ToolStep("test__add", called.arguments, "5", text="Let me see. "),)

    run(settings, endpoint, work)
    first, second = endpoint.asked
    assert "test__add" in [tool["function"]["name"] for tool in first["tools"]]
    assistant, tool = second["messages"][-2:]
    assert assistant["content"] == "Let me see. "
    assert assistant["tool_calls"][0]["function"] == {"name": "test__add", "arguments": '{"a": 2, "b": 3}'}
    assert tool == {"role": "tool", "tool_call_id": assistant["tool_calls"][0]["id"], "content": "5"}


def test_reply_that_waits_for_permission_fails_when_the_engine_exits(
    settings: Settings, endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint.replies = [ADD, ["Later."]]
    has_exited = asyncio.Event()
    monkeypatch.setattr(EngineServer, "wait_until_lost", lambda _: has_exited.wait())
    monkeypatch.setattr(EngineServer, "is_lost", lambda _: has_exited.is_set())

    async def work(client: TerminalClient) -> None:
        chat, message = await new_chat(client)
        received: list[ReplyEvent] = []
        async with aclosing(client.replies.reply(chat, message)) as events:
            async for event in events:
                received.append(event)
                if isinstance(event, ToolCalled):
                    has_exited.set()
        error = "The engine stopped during this reply. It restarts when you retry."
        assert received[-1] == ReplyEnd(Finish.FAILED, error=error)
        assert (await client.chats.open(chat)).messages[-1].finish is Finish.FAILED
        has_exited.clear()
        assert TextDelta("Later.", 1) in await replied(client, *await new_chat(client))

    run(settings, endpoint, work)


def test_model_learns_that_a_result_was_cut(settings: Settings, endpoint: FakeEndpoint) -> None:
    endpoint.replies = [call("test__long", "{}"), ["Long."]]

    async def work(client: TerminalClient) -> None:
        await replied(client, *await new_chat(client))

    run(settings, endpoint, work)
    assert endpoint.asked[1]["messages"][-1]["content"].endswith("x\n[The result was cut: 200,000 more characters.]")


def test_servers_of_another_file_are_added(settings: Settings, endpoint: FakeEndpoint, tmp_path: Path) -> None:
    more = tmp_path / "more.json"
    more.write_text(json.dumps({"mcpServers": {"other": {"command": "no", "disabled": True}}}))

    async def main() -> None:
        client = TerminalClient(settings, History(None), {"stay": False}, endpoint.url, "secret", more)
        try:
            assert [server.name for server in await client.tools.servers()] == ["test", "other"]
            assert client.tools.config_paths()[1:] == [more]
        finally:
            await client.close()

    asyncio.run(main())


def test_tools_that_are_left_out_are_counted(
    settings: Settings, endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.mcp.server.MAX_TOOLS", 2)

    async def work(client: TerminalClient) -> None:
        await client.tools.offered(())
        [server] = await client.tools.servers()
        assert (len(server.tools), server.left_out > 2) == (2, True)

    run(settings, endpoint, work)


def test_later_prompts_repeat_the_calls_unchanged(settings: Settings, endpoint: FakeEndpoint) -> None:
    both = [*ADD, *call("test__add", '{"a": 1, "b": 1}', 1)]
    endpoint.replies = [both, ["Five, and two."], ["You are welcome."]]

    async def work(client: TerminalClient) -> None:
        chat, message = await new_chat(client)
        await replied(client, chat, message)
        leaf = (await client.chats.open(chat)).leaf
        thanks = await client.chats.add(chat, leaf, "Thanks.")
        await replied(client, chat, thanks.id)

    run(settings, endpoint, work)
    _, second, third = endpoint.asked
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "tool", "tool"]
    assert third["messages"][: len(second["messages"])] == second["messages"]
    assert third["messages"][-2:] == [
        {"role": "assistant", "content": "Five, and two."},
        {"role": "user", "content": "Thanks."},
    ]


@pytest.mark.parametrize(
    ("permission", "asks_again", "asks_in_another_chat"),
    [(Permission.ONCE, True, True), (Permission.CHAT, False, True), (Permission.ALWAYS, False, False)],
)
def test_permission_applies_to_one_call_one_chat_or_all_chats(
    settings: Settings, endpoint: FakeEndpoint, permission: Permission, asks_again: bool, asks_in_another_chat: bool
) -> None:
    endpoint.replies = [ADD, ["5"]] * 4

    async def work(client: TerminalClient) -> None:
        chat, message = await new_chat(client)
        assert calls_of(await replied(client, chat, message, permission)) == [True]
        assert calls_of(await replied(client, chat, message)) == [asks_again]
        other, message = await new_chat(client)
        assert calls_of(await replied(client, other, message)) == [asks_in_another_chat]

    run(settings, endpoint, work)

    async def later(client: TerminalClient) -> None:
        chat, message = await new_chat(client)
        assert calls_of(await replied(client, chat, message)) == [permission is not Permission.ALWAYS]
        await client.tools.revoke("test__add")
        endpoint.replies = [ADD, ["5"]]
        assert calls_of(await replied(client, chat, message)) == [True]

    run(settings, endpoint, later)


def test_denied_call_is_reported_to_the_model(settings: Settings, endpoint: FakeEndpoint) -> None:
    endpoint.replies = [ADD, ["As you wish."]]

    async def work(client: TerminalClient) -> None:
        chat, message = await new_chat(client)
        await replied(client, chat, message, Permission.DENY)
        [step] = (await client.chats.open(chat)).messages[-1].steps
        assert step.is_error
        assert "did not allow" in step.result

    run(settings, endpoint, work)
    assert "did not allow" in endpoint.asked[1]["messages"][-1]["content"]


def test_stop_ends_a_call_that_asks(settings: Settings, endpoint: FakeEndpoint) -> None:
    endpoint.replies = [["Wait. ", *ADD]]

    async def work(client: TerminalClient) -> None:
        chat, message = await new_chat(client)
        events = await replied(client, chat, message, None)
        assert isinstance(events[-1], ReplyEnd)
        assert events[-1].finish is Finish.STOPPED
        reply = (await client.chats.open(chat)).messages[-1]
        assert (reply.text, reply.finish, reply.steps) == ("Wait. ", Finish.STOPPED, ())

    run(settings, endpoint, work)
    assert len(endpoint.asked) == 1


@pytest.mark.share(3)
@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("other__thing", "{}", "There is no tool other__thing."),
        ("add", "{}", "There is no tool add. Similar tools: test__add."),
        ("test_ad", "{}", "There is no tool test_ad. Similar tools: test__add"),
        ("test__add", "{", "invalid"),
        ("test__add", '{"a": "x"}', "add"),
        ("test__die", "{}", "closed"),
    ],
)
def test_failed_call_returns_an_error_result_to_the_model(
    settings: Settings, endpoint: FakeEndpoint, name: str, arguments: str, reason: str
) -> None:
    endpoint.replies = [call(name, arguments), ["I see."]]

    async def work(client: TerminalClient) -> None:
        chat, message = await new_chat(client)
        events = await replied(client, chat, message)
        assert isinstance(events[-1], ReplyEnd)
        assert events[-1].finish is Finish.COMPLETE
        [step] = (await client.chats.open(chat)).messages[-1].steps
        assert step.is_error
        assert reason in step.result

    run(settings, endpoint, work)


def test_reply_ends_after_the_maximum_number_of_turns(
    settings: Settings, endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.chat_backend.replies.MAX_TURNS", 3)
    endpoint.replies = [ADD]

    async def work(client: TerminalClient) -> None:
        chat, message = await new_chat(client)
        events = await replied(client, chat, message, Permission.CHAT)
        assert len(calls_of(events)) == 3
        assert isinstance(events[-1], ReplyEnd)

    run(settings, endpoint, work)


def test_disabled_tools_are_not_offered(settings: Settings, endpoint: FakeEndpoint) -> None:
    async def work(client: TerminalClient) -> None:
        chosen = ChatSettings(disabled_tools=frozenset({"test__add"}))
        chat, message = await new_chat(client, chosen)
        assert (await client.chats.open(chat)).settings == chosen
        await replied(client, chat, message)

    run(settings, endpoint, work)
    names = [tool["function"]["name"] for tool in endpoint.asked[0]["tools"]]
    assert "test__add" not in names
    assert "test__fail" in names


def test_chat_without_mcp_json_offers_no_tools(settings: Settings, endpoint: FakeEndpoint, config: Path) -> None:
    config.unlink()

    async def work(client: TerminalClient) -> None:
        assert await client.tools.servers() == []
        chat, message = await new_chat(client)
        events = await replied(client, chat, message)
        assert [event.text for event in events if isinstance(event, TextDelta)] == ["Hello."]

    run(settings, endpoint, work)
    assert "tools" not in endpoint.asked[0]


def test_servers_follow_changes_of_mcp_json(settings: Settings, endpoint: FakeEndpoint, config: Path) -> None:
    async def work(client: TerminalClient) -> None:
        await client.tools.restart("test")
        [server] = await client.tools.servers()
        assert (server.name, server.state) == ("test", "ready")
        assert "test__add" in [tool.name for tool in server.tools]
        config.write_text("{")
        with pytest.raises(ClientError, match=r"mcp\.json"):
            await client.tools.servers()
        chat, message = await new_chat(client)
        assert isinstance((await replied(client, chat, message))[-1], ReplyEnd)
        config.write_text(json.dumps({"mcpServers": {"missing": {"command": "no-such-command"}}}))
        await client.tools.restart("missing")
        [server] = await client.tools.servers()
        assert (server.name, server.state) == ("missing", "failed")
        assert "no-such-command" in server.reason

    run(settings, endpoint, work)


def test_concurrent_reads_of_a_changed_mcp_json_start_one_set_of_servers(
    settings: Settings, endpoint: FakeEndpoint, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[ToolServers] = []

    class Recorded(ToolServers):
        def __init__(self, specs: Sequence[ServerSpec]) -> None:
            super().__init__(specs)
            made.append(self)

    monkeypatch.setattr(tool_servers, "ToolServers", Recorded)

    async def work(client: TerminalClient) -> None:
        await client.tools.restart("test")
        config.write_text(json.dumps({"mcpServers": {"other": {"command": sys.executable, "args": [PROGRAM]}}}))
        await asyncio.gather(*(client.tools.servers() for _ in range(3)))
        assert len(made) == 2

    run(settings, endpoint, work)
