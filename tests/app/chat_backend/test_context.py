"""Tests for the context budget and trimming, with a running engine."""

from collections.abc import Mapping
from typing import Any

import pytest

from app.chat_backend.client import TerminalClient
from app.chat_backend.endpoint import ChatEndpoint
from tests.app.chat_backend.conftest import Clients
from tests.app.chat_backend.flows import LONG, SHORT, asked, replied, run
from tui.plain_text import sanitize
from tui.types import Attachment, ChatId, ChatSettings, FullContext, MessageId, Sampling


@pytest.mark.usefixtures("running")
def test_budget_counts_typed_tokens(clients: Clients) -> None:
    async def work(client: TerminalClient) -> None:
        empty = await client.context.budget(None, None, "")
        assert (empty.limit, empty.system) == (2048, 0)
        typed = await client.context.budget(None, None, "word " * 50)
        assert typed.history >= empty.history + 50
        assert await client.replies.count_tokens("word " * 50) >= 50

    run(clients, work)


@pytest.mark.usefixtures("running")
@pytest.mark.parametrize("how", [FullContext.DROP_OLDEST, FullContext.SUMMARIZE])
def test_trimming_leaves_out_messages_and_frees_tokens(clients: Clients, how: FullContext) -> None:
    async def work(client: TerminalClient) -> None:
        chat, leaf = await asked(client, SHORT, "one two three " * 100)
        for text in ("four " * 100, "five " * 100):
            await replied(client, chat, leaf)
            parent = (await client.chats.open(chat)).leaf
            leaf = (await client.chats.add(chat, parent, text, [Attachment("f.txt", "six " * 300)])).id
        before = await client.context.budget(chat, leaf, "")
        assert before.system > 0
        assert before.reserve == 8
        plan = await client.context.plan(chat, leaf, how, "")
        assert plan.messages
        assert leaf not in plan.messages
        opened = await client.context.trim(chat, plan)
        assert set(plan.messages) <= opened.left_out
        assert bool(opened.summaries) == (how is FullContext.SUMMARIZE)
        after = await client.context.budget(chat, leaf, "")
        assert after.history + after.system < before.history + before.system

    run(clients, work)


async def answered(client: TerminalClient, text: str, most: int) -> tuple[ChatId, MessageId | None]:
    """Create a chat with one question and its reply. Returns the chat and the reply."""
    chat, question = await asked(client, ChatSettings(sampling=Sampling(max_tokens=most, seed=5)), text)
    await replied(client, chat, question)
    await client.chats.configure(chat, SHORT)
    return chat, (await client.chats.open(chat)).leaf


@pytest.mark.usefixtures("running")
@pytest.mark.parametrize("how", [FullContext.DROP_OLDEST, FullContext.SUMMARIZE])
def test_reply_is_trimmed_with_its_question(clients: Clients, how: FullContext) -> None:
    async def work(client: TerminalClient) -> None:
        chat, leaf = await answered(client, "Hi", 2048)
        await client.chats.configure(chat, LONG)
        budget = await client.context.budget(chat, leaf, "and now?")
        assert budget.lacking
        plan = await client.context.plan(chat, leaf, how, "and now?")
        assert len(plan.messages) == 2
        assert plan.tokens > 0
        assert plan.suffices(budget)
        await client.context.trim(chat, plan)
        assert not (await client.context.budget(chat, leaf, "and now?")).lacking
        await replied(client, chat, (await client.chats.add(chat, leaf, "and now?")).id)

    run(clients, work)


@pytest.mark.usefixtures("running")
def test_plan_reports_a_message_that_is_too_long(clients: Clients) -> None:
    async def work(client: TerminalClient) -> None:
        chat, leaf = await answered(client, "Hi", 8)
        typed = "word " * 4000
        plan = await client.context.plan(chat, leaf, FullContext.DROP_OLDEST, typed)
        assert len(plan.messages) == 2
        assert plan.tokens > 0
        assert not plan.suffices(await client.context.budget(chat, leaf, typed))
        nothing = await client.context.plan(chat, None, FullContext.SUMMARIZE, typed)
        assert (nothing.messages, nothing.tokens) == ((), 0)
        assert (await client.context.trim(chat, nothing)).summaries == ()

    run(clients, work)


@pytest.mark.usefixtures("running")
def test_unanswered_question_is_not_trimmed(clients: Clients) -> None:
    async def work(client: TerminalClient) -> None:
        chat, leaf = await answered(client, "Hi", 8)
        question = (await client.chats.add(chat, leaf, "word " * 1900)).id
        plan = await client.context.plan(chat, question, FullContext.DROP_OLDEST, "")
        assert plan.messages
        assert question not in plan.messages

    run(clients, work)


@pytest.mark.usefixtures("running")
def test_summary_is_sent_only_in_branches_that_it_summarizes(clients: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies: list[Mapping[str, Any]] = []
    stream = ChatEndpoint.stream

    def listened(endpoint: ChatEndpoint, body: Mapping[str, Any]) -> Any:
        bodies.append(body)
        return stream(endpoint, body)

    async def work(client: TerminalClient) -> None:
        chat, leaf = await answered(client, "Hi", 8)
        plan = await client.context.plan(chat, leaf, FullContext.SUMMARIZE, "on")
        [summary] = (await client.context.trim(chat, plan)).summaries
        assert summary.message == leaf
        monkeypatch.setattr(ChatEndpoint, "stream", listened)
        await replied(client, chat, (await client.chats.add(chat, leaf, "go on")).id)
        await replied(client, chat, (await client.chats.add(chat, None, "other")).id)
        before, other = ([message["content"] for message in body["messages"]] for body in bodies)
        assert summary.text in sanitize(before[0])
        assert other == ["Be brief.", "other"]

    run(clients, work)


@pytest.mark.usefixtures("running")
def test_titles_and_summaries_use_default_sampling(clients: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies: list[Mapping[str, Any]] = []

    async def written(_: ChatEndpoint, body: Mapping[str, Any]) -> str:
        bodies.append(body)
        return "Words"

    async def work(client: TerminalClient) -> None:
        chat, leaf = await answered(client, "Hi", 8)
        monkeypatch.setattr(ChatEndpoint, "complete", written)
        await client.chats.title(chat)
        await client.context.trim(chat, await client.context.plan(chat, leaf, FullContext.SUMMARIZE, "on"))
        assert [body["top_p"] for body in bodies] == [0.95, 0.95]

    run(clients, work)
