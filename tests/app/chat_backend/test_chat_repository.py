"""Tests for the repository of chats."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from app.chat_backend.chat_repository import ChatRepository
from app.history.database import FILE_NAME
from app.history.history import History
from tui.client import ClientError
from tui.types import ChatId, ChatSettings, Notice


def test_notices_arrive_when_damage_is_found(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).touch()

    async def flow() -> None:
        chats = ChatRepository(History(tmp_path))
        notices = chats.notices()
        assert (await anext(notices)).message.startswith("The chat history was an empty file")
        chat = (await chats.create(ChatSettings())).summary.id
        await chats.add(chat, None, "a question")
        with closing(sqlite3.connect(tmp_path / FILE_NAME)) as other, other:
            other.execute("UPDATE messages SET text = 'another question'")
        coming = asyncio.ensure_future(anext(notices))
        await damaged(chats, chat)
        assert [message.text for message in (await chats.open(chat)).messages] == ["another question"]
        notice = await coming
        assert isinstance(notice, Notice)
        assert "Saved: 1 chat and 1 message. Lost: nothing known. Partly damaged: 1 message." in notice.message
        await notices.aclose()
        chats.close()

    asyncio.run(flow())


def test_backup_has_archived_chats_and_no_private_ones(tmp_path: Path) -> None:
    async def flow() -> None:
        chats = ChatRepository(History(tmp_path / "history"))
        made = [(await chats.create(ChatSettings(), private=private)).summary.id for private in (False, False, True)]
        for number, chat in enumerate(made):
            await chats.add(chat, None, f"question {number}")
        await chats.create(ChatSettings())  # an empty chat is not exported
        await chats.archive(made[1], archived=True)
        file = tmp_path / "all.json"
        assert await chats.export_all(file) == 2
        with pytest.raises(ClientError, match="already exists"):
            await chats.export_all(file)
        other = ChatRepository(History(tmp_path / "other"))
        assert {chat.title for chat in await other.import_chats(file)} == {"question 0", "question 1"}
        chats.close()
        other.close()

    asyncio.run(flow())


async def damaged(chats: ChatRepository, chat: ChatId) -> None:
    with pytest.raises(ClientError, match="was damaged") as raised:
        await chats.open(chat)
    assert raised.value.remedy == "It was repaired as far as possible. Try again."
