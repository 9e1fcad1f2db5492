"""How full a context is, and how room is made in it, over a running engine."""

import pytest

from app.terminal_chat.client import TerminalClient
from tests.app.terminal_chat.conftest import Clients
from tests.app.terminal_chat.flows import SHORT, asked, replied, run
from tui.nouns import Attachment, FullContext


@pytest.mark.usefixtures("running")
def test_a_context_has_a_budget(clients: Clients) -> None:
    async def work(client: TerminalClient) -> None:
        empty = await client.context.budget(None, None, "")
        assert (empty.limit, empty.system) == (2048, 0)
        typed = await client.context.budget(None, None, "word " * 50)
        assert typed.history >= empty.history + 50
        assert await client.replies.count_tokens("word " * 50) >= 50

    run(clients, work)


@pytest.mark.usefixtures("running")
@pytest.mark.parametrize("how", [FullContext.DROP_OLDEST, FullContext.SUMMARIZE])
def test_room_is_made(clients: Clients, how: FullContext) -> None:
    async def work(client: TerminalClient) -> None:
        chat, leaf = await asked(client, SHORT, "one two three " * 100)
        for text in ("four " * 100, "five " * 100):
            await replied(client, chat, leaf)
            parent = (await client.chats.open(chat)).leaf
            leaf = (await client.chats.add(chat, parent, text, [Attachment("f.txt", "six " * 300)])).id
        before = await client.context.budget(chat, leaf, "")
        assert before.system > 0
        assert before.reserve == 8
        room = await client.context.plan(chat, leaf, how)
        assert room.messages
        assert leaf not in room.messages
        opened = await client.context.make(chat, room)
        assert set(room.messages) <= opened.left_out
        assert bool(opened.summary_text) == (how is FullContext.SUMMARIZE)
        after = await client.context.budget(chat, leaf, "")
        assert after.history + after.system < before.history + before.system

    run(clients, work)
