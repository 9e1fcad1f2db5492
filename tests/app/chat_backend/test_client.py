"""Tests of the chat's client with a running engine."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

import pytest

from app.chat_backend.client import TerminalClient
from app.chat_backend.endpoint import ChatEndpoint
from app.chat_backend.engine.connection import EngineConnection
from app.chat_backend.reply_parts import ReplyPart
from app.chat_backend.tools import ChatTools
from app.client.http import ServerUnreachable
from app.models import catalog, sampling_defaults
from tests.app.chat_backend.conftest import Clients
from tests.app.chat_backend.flows import LONG, SHORT, asked, held, replied, run
from tests.app.server.live_server import LiveServer
from tests.support.processes import until
from tui.client import ClientError
from tui.drafts import LARGEST
from tui.engine_types import EngineRequest, Phase
from tui.types import (
    ChatId,
    ChatSettings,
    EngineRestarting,
    Finish,
    PromptProgress,
    ReplyEnd,
    ReplyEvent,
    ReplyStarted,
    Sampling,
    TextDelta,
)

SOME = 40  # number of engine steps to release


@pytest.mark.usefixtures("running")
def test_reply_is_streamed_and_stored(clients: Clients) -> None:
    async def work(client: TerminalClient) -> tuple[ChatId, str]:
        stages = [state async for state in client.engine.loading()]
        assert all(state.model for state in stages)
        chat, question = await asked(client)
        started, *parts, end = await replied(client, chat, question)
        assert isinstance(started, ReplyStarted)
        assert isinstance(end, ReplyEnd)
        assert (end.finish, end.error) == (Finish.LENGTH, "")
        assert end.usage is not None
        assert end.usage.reply_tokens == 8
        assert end.usage.sources.computed > 0
        deltas = [part for part in parts if isinstance(part, TextDelta)]
        text = "".join(part.text for part in deltas)
        assert sum(part.tokens for part in deltas) == 8
        _, reply = (await client.chats.open(chat)).messages
        assert (reply.id, reply.text, reply.finish, reply.usage) == (started.message, text, Finish.LENGTH, end.usage)
        assert reply.model == started.model == "hash"
        again = [event for event in await replied(client, chat, question) if isinstance(event, ReplyEnd)]
        assert again[0].usage is not None
        assert again[0].usage.sources.device > 0
        assert client.engine.address().endswith("/v1")
        return chat, text

    chat, text = run(clients, work)
    opened = run(clients, lambda client: client.chats.open(chat))
    first, other = (message for message in opened.messages if message.parent is not None)
    assert (first.text, first.model, opened.leaf) == (text, "hash", other.id)
    assert first.text == other.text  # both replies use the same seed


@pytest.mark.usefixtures("running")
def test_reply_that_fills_the_context_says_so(clients: Clients) -> None:
    async def work(client: TerminalClient) -> None:
        async for _ in client.engine.loading():
            pass
        text = "a " * 900
        text += "a " * (2000 - await client.replies.count_tokens(text))
        chat, question = await asked(client, ChatSettings(sampling=Sampling(seed=5)), text)
        end = (await replied(client, chat, question))[-1]
        assert isinstance(end, ReplyEnd)
        assert end.finish is Finish.CONTEXT_FULL
        assert (await client.chats.open(chat)).messages[-1].finish is Finish.CONTEXT_FULL

    run(clients, work)


def test_stopped_reply_keeps_its_text(clients: Clients, running: LiveServer) -> None:
    async def work(client: TerminalClient) -> None:
        chat, question = await asked(client, LONG)
        events: list[ReplyEvent] = []
        with held(running) as steps:
            steps.release(SOME)
            async with aclosing(client.replies.reply(chat, question)) as coming:
                async for event in coming:
                    events.append(event)
                    if len([one for one in events if isinstance(one, TextDelta)]) == 3:
                        await client.replies.stop(events[0].message)  # type: ignore[union-attr]
                    steps.release(SOME)
        assert isinstance(events[-1], ReplyEnd)
        assert events[-1].finish is Finish.STOPPED
        assert events[-1].usage is not None
        assert events[-1].usage.sources.computed > 0
        assert 3 <= events[-1].usage.reply_tokens < 1500
        assert events[-1].usage.tokens_per_second > 0
        message = (await client.chats.open(chat)).messages[-1]
        assert (message.finish, message.usage) == (Finish.STOPPED, events[-1].usage)
        assert message.text == "".join(event.text for event in events if isinstance(event, TextDelta))
        until(lambda: not running.streams.requests())

    run(clients, work)


def test_closing_the_stream_ends_the_reply(clients: Clients, running: LiveServer) -> None:
    async def work(client: TerminalClient) -> None:
        chat, question = await asked(client, LONG)
        with held(running) as steps:
            steps.release(SOME)
            async with aclosing(client.replies.reply(chat, question)) as coming:
                async for event in coming:
                    if isinstance(event, TextDelta):
                        heard = event.text
                        assert (await client.chats.open(chat)).messages[-1].finish is None
                        break
        message = (await client.chats.open(chat)).messages[-1]
        assert (message.finish, message.text.startswith(heard)) == (Finish.STOPPED, True)
        until(lambda: not running.streams.requests())

    run(clients, work)


def test_other_windows_see_that_a_question_waits_for_its_reply(
    clients: Clients, running: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(client: TerminalClient) -> None:
        chat, question = await asked(client)
        is_waiting = asyncio.Event()

        async def wait(*_: object) -> None:
            is_waiting.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(ChatTools, "offered", wait)
        async with clients() as other:
            assert (await other.chats.open(chat)).messages[-1].finish is Finish.UNANSWERED
            coming = asyncio.create_task(anext(client.replies.reply(chat, question)))
            await is_waiting.wait()
            assert (await other.chats.open(chat)).messages[-1].finish is Finish.ELSEWHERE
            assert (await client.chats.open(chat)).messages[-1].finish is None
            coming.cancel()
            await asyncio.wait({coming})
            assert (await other.chats.open(chat)).messages[-1].finish is Finish.UNANSWERED
            assert (await client.chats.open(chat)).messages[-1].finish is Finish.UNANSWERED

    run(clients, work)


def test_other_windows_see_that_a_reply_is_being_generated(clients: Clients, running: LiveServer) -> None:
    async def work(client: TerminalClient) -> None:
        chat, question = await asked(client, LONG)
        async with clients() as other:
            with held(running) as steps:
                steps.release(SOME)
                async with aclosing(client.replies.reply(chat, question)) as coming:
                    async for event in coming:
                        if isinstance(event, TextDelta):
                            break
                    [seen], [own] = await other.chats.summaries(), await client.chats.summaries()
                    assert (seen.replying_elsewhere, own.replying_elsewhere) == (True, False)
                    assert (await other.chats.open(chat)).messages[-1].finish is Finish.ELSEWHERE
            [seen] = await other.chats.summaries()
            assert not seen.replying_elsewhere
            assert (await other.chats.open(chat)).messages[-1].finish is Finish.STOPPED

    run(clients, work)


@pytest.mark.usefixtures("running")
def test_reply_of_a_killed_process_is_cut_off(clients: Clients, settings: object) -> None:
    async def work(client: TerminalClient) -> ChatId:
        chat, question = await asked(client)
        history, number = client.chats.locate(chat)
        coming = history.messages.start_reply(number, int(question), "hash")
        history.messages.write_reply(coming.id, "as far as", "")
        return chat

    chat = run(clients, work)
    message = run(clients, lambda client: client.chats.open(chat)).messages[-1]
    assert (message.text, message.finish) == ("as far as", Finish.CUT_OFF)


def test_engine_status_lists_requests_and_aborts_them(clients: Clients, running: LiveServer) -> None:
    async def work(client: TerminalClient) -> None:
        chat, question = await asked(client, LONG)
        request: EngineRequest | None = None
        with held(running) as steps:
            steps.release(SOME)
            async with aclosing(client.replies.reply(chat, question)) as coming:
                async for event in coming:
                    if isinstance(event, TextDelta) and request is None:
                        [request] = (await client.engine.status()).requests
                        assert (request.phase, request.mine, request.priority) == (Phase.WRITING, True, "interactive")
                        assert request.prompt_done == request.prompt_total > 0
                        await client.engine.abort(request.id)
                        steps.release(SOME)
                    last = event
        assert isinstance(last, ReplyEnd)
        assert (last.finish, last.error) == (Finish.STOPPED, "")
        reopened = (await client.chats.open(chat)).messages[-1]
        assert (reopened.finish, reopened.error, reopened.usage) == (Finish.STOPPED, "", last.usage)
        status = await client.engine.status()
        assert (status.model, status.requests) == ("hash", ())
        assert status.reply_tokens > 0
        assert status.tiers[0].total > 0

    run(clients, work)


@pytest.mark.usefixtures("running")
def test_regenerating_a_greedy_reply_uses_sampling(clients: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies: list[Mapping[str, object]] = []
    stream = ChatEndpoint.stream

    def noted(endpoint: ChatEndpoint, body: Mapping[str, object]) -> AsyncGenerator[ReplyPart]:
        bodies.append(body)
        return stream(endpoint, body)

    monkeypatch.setattr(ChatEndpoint, "stream", noted)
    monkeypatch.setattr(sampling_defaults, "suitable_sampling", lambda *_: catalog.Sampling(0.0, min_p=0.1))

    async def work(client: TerminalClient) -> None:
        chat, question = await asked(client)
        await replied(client, chat, question)
        await replied(client, chat, question)
        await client.chats.configure(chat, ChatSettings(sampling=Sampling(max_tokens=8, temperature=0.0)))
        await replied(client, chat, question)
        usages = [message.usage for message in (await client.chats.open(chat)).messages if message.usage]
        assert [usage.retry_temperature for usage in usages] == [None, 0.7, None]

    run(clients, work)
    assert [body["temperature"] for body in bodies] == [0.0, 0.7, 0.0]
    assert {body["min_p"] for body in bodies} == {0.1}


def test_private_chat_is_gone_in_the_next_run(clients: Clients, running: LiveServer, settings: object) -> None:
    async def work(client: TerminalClient) -> None:
        chat = (await client.chats.create(SHORT, private=True)).summary
        assert chat.private
        message = await client.chats.add(chat.id, None, "between us")
        await replied(client, chat.id, message.id)
        assert [one.id for one in await client.chats.summaries()] == [chat.id]
        assert await client.chats.inputs() == []
        assert [hit.chat.id for hit in await client.chats.search("between")] == [chat.id]

    run(clients, work)
    assert run(clients, lambda client: client.chats.summaries()) == []


@pytest.mark.usefixtures("running")
def test_chat_is_titled_renamed_deleted_and_restored(clients: Clients) -> None:
    async def work(client: TerminalClient) -> None:
        chat, question = await asked(client, SHORT, "Tell me of rivers in Norway please and of lakes and hills")
        assert (await client.chats.open(chat)).summary.title.startswith("Tell me of rivers")
        await replied(client, chat, question)
        assert await client.chats.title(chat)
        await client.chats.rename(chat, "Mine")
        await client.chats.title(chat)
        assert (await client.chats.open(chat)).summary.title == "Mine"
        await client.chats.delete(chat)
        with pytest.raises(ClientError, match="this chat does not exist"):
            await client.chats.open(chat)
        await client.chats.undelete(chat)
        await client.chats.delete(chat)

    run(clients, work)
    assert run(clients, lambda client: client.chats.summaries()) == []


@pytest.mark.usefixtures("running")
def test_invalid_calls_raise_client_errors(clients: Clients) -> None:
    async def work(client: TerminalClient) -> None:
        chat, question = await asked(client, ChatSettings(sampling=Sampling(temperature=900.0)))
        with pytest.raises(ClientError, match="temperature"):
            await replied(client, chat, question)
        assert len((await client.chats.open(chat)).messages) == 1
        for nobody in (ChatId("999"), ChatId("x"), ChatId("private-9")):
            with pytest.raises(ClientError, match="this chat does not exist"):
                await client.chats.rename(nobody, "x")

    run(clients, work)


def test_client_implements_the_port(clients: Clients) -> None:
    """The assignment lets mypy check the types."""
    from tui.client import Client

    async def main() -> None:
        async with clients() as client:
            port: Client = client
            assert port.chats is client.chats

    asyncio.run(main())


@pytest.mark.usefixtures("running")
def test_tokens_of_the_largest_attachment_are_counted(clients: Clients) -> None:
    """The attachment exceeds the context. The user sees by how many tokens."""
    text = "word " * (LARGEST // 5)

    async def work(client: TerminalClient) -> None:
        tokens = await client.replies.count_tokens(text)
        assert tokens > LARGEST // 10
        budget = await client.context.budget(None, None, text)
        assert budget.history >= tokens

    run(clients, work)


def test_reply_stopped_during_prefill_reports_prefilled_tokens(clients: Clients, running: LiveServer) -> None:
    async def work(client: TerminalClient) -> None:
        chat, question = await asked(client, LONG, "one two three " * 300)
        read = 0
        with held(running) as steps:
            steps.release()
            async with aclosing(client.replies.reply(chat, question)) as coming:
                async for event in coming:
                    if isinstance(event, ReplyStarted):
                        reply = event.message
                    if isinstance(event, PromptProgress) and event.done and not read:
                        read, total = event.done, event.total
                        await client.replies.stop(reply)
                        steps.release(SOME)
                    last = event
        assert isinstance(last, ReplyEnd)
        assert (last.finish, last.usage is None) == (Finish.STOPPED, False)
        assert last.usage is not None
        cost = last.usage
        assert 0 < read <= cost.sources.device + cost.sources.computed < total
        assert last.usage.reply_tokens == 0
        assert last.usage.prompt_seconds > 0

    run(clients, work)


@pytest.mark.usefixtures("running")
@pytest.mark.parametrize("is_noticed", [True, False])
def test_reply_after_the_engine_stopped_reports_the_restart(
    is_noticed: bool, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit is noticed before the request, or the request fails because of it."""
    stream, requests = ChatEndpoint.stream, [is_noticed, True]  # whether each request is answered

    async def fail_first(endpoint: ChatEndpoint, body: Mapping[str, object]) -> AsyncGenerator[ReplyPart]:
        if not requests.pop(0):
            raise ServerUnreachable("the engine stopped during this reply", "It restarts when you retry.")
        async with aclosing(stream(endpoint, body)) as parts:
            async for part in parts:
                yield part

    answers = [True] if is_noticed else [False, False, True, True]  # of `is_lost`; all later ones are False

    async def is_lost(_: EngineConnection) -> bool:
        return bool(answers) and answers.pop(0)

    async def work(client: TerminalClient) -> None:
        chat, question = await asked(client)
        monkeypatch.setattr(ChatEndpoint, "stream", fail_first)
        monkeypatch.setattr(EngineConnection, "is_lost", is_lost)
        first, *_, end = await replied(client, chat, question)
        assert isinstance(first, EngineRestarting)
        assert isinstance(end, ReplyEnd)

    run(clients, work)
