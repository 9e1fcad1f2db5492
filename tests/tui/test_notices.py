"""Tests for notices of the store of chats."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from tests.tui.pilots import Chatting, at_rest, run
from tests.tui.scripted_client import ScriptedChats, ScriptedClient
from tui.app import ChatApp
from tui.types import Notice
from tui.widgets.top_bar import TopBar


class Store(ScriptedChats):
    """A store whose notices the test sends one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.coming = asyncio.Queue[Notice]()

    async def notices(self) -> AsyncGenerator[Notice, None]:
        while True:
            yield await self.coming.get()


def test_notifications_close_soon_and_do_not_pile_up() -> None:
    async def flow(chat: Chatting) -> None:
        chat.app.notify("Failed.", title="Error", severity="error")
        for text in ("Pinned.", "Unpinned.", "Deleted."):
            chat.app.notify(text)
        await chat.until(lambda: [one.message for one in chat.app._notifications] == ["Failed.", "Deleted."])
        error, confirmation = chat.app._notifications
        assert confirmation.timeout < error.timeout

    run(ScriptedClient(), flow)


def test_low_terminal_shows_one_notification() -> None:
    async def flow(chat: Chatting) -> None:
        for text in ("It failed.", "And then this."):
            chat.app.notify(text, title="Error", severity="error")
        await chat.until(lambda: chat.notices() == ["Error And then this."])

    run(ScriptedClient(), flow, size=(60, 15))


def test_shown_notification_is_not_repeated() -> None:
    async def flow(chat: Chatting) -> None:
        for _ in range(2):
            chat.app.notify("Try again.", title="It failed.", severity="error")
        chat.app.notify("And then this.")
        await chat.until(lambda: chat.notices() == ["It failed. Try again.", "And then this."])

    run(ScriptedClient(), flow)


def test_newer_error_replaces_one_with_the_same_remedy() -> None:
    async def flow(chat: Chatting) -> None:
        for number in (363, 726):
            chat.app.notify("Shorten it.", title=f"This message is {number} tokens too long.", severity="error")
        await chat.until(lambda: chat.notices() == ["This message is 726 tokens too long. Shorten it."])

    run(ScriptedClient(), flow)


def test_notices_are_shown_and_unsaved_state_stays_visible() -> None:
    client, store = ScriptedClient(), Store()
    client.chats = store

    async def flow(chat: Chatting) -> None:
        bar = chat.screen.query_one(TopBar)
        store.coming.put_nowait(Notice("The chat history was damaged.", "It is kept as\x1b[31m x."))
        await chat.until(lambda: len(chat.app._notifications) == 1)
        [shown] = chat.app._notifications
        assert (shown.title, shown.message) == ("The chat history was damaged.", "It is kept as␛[31m x.")
        assert bar.is_saved
        store.coming.put_nowait(Notice("Nothing is saved: the disk is full.", "Make room.", is_saved=False))
        await chat.until(lambda: not bar.is_saved)
        assert bar.render().plain.startswith(" Not saved: New chat")
        store.coming.put_nowait(Notice("Chats are saved again."))
        await chat.until(lambda: bar.is_saved)
        assert bar.render().plain.startswith(" New chat")

    run(client, flow)


def test_long_notification_is_shown_whole_in_a_small_terminal() -> None:
    async def main() -> None:
        client = ScriptedClient()
        app = ChatApp(client)
        async with app.run_test(size=(60, 15), notifications=True) as pilot:
            chat = Chatting(app, pilot, client)
            words = [f"{number:013}" for number in range(12)]  # two of them fill a line to its last column
            app.notify(" ".join(words))
            await chat.until(lambda: any(words[0] in line for line in chat.lines()))
            shown = " ".join(line.partition("▌")[2] for line in chat.lines())
            assert shown.split()[: len(words)] == words

    asyncio.run(main())


def test_notification_that_replaces_others_is_at_the_top() -> None:
    async def main() -> None:
        client = ScriptedClient()
        app = ChatApp(client)
        async with app.run_test(size=(60, 15), notifications=True) as pilot:
            chat = Chatting(app, pilot, client)
            for text in ("first", "second", "third"):
                app.notify(text)
                await at_rest(pilot, chat.lines)
            assert "third" in chat.lines()[0]

    asyncio.run(main())


@pytest.mark.parametrize("keys", [["f7"], ["h", "i", "enter"]])
def test_dialogs_and_messages_close_notifications_except_warnings(keys: list[str]) -> None:
    async def flow(chat: Chatting) -> None:
        chat.app.notify("Saved to a file.", timeout=600)
        chat.app.notify("Nothing is saved.", severity="warning")
        await chat.pilot.press(*keys)
        await chat.until(lambda: chat.notices() == ["Nothing is saved."])

    run(ScriptedClient(), flow)


def test_short_notification_covers_only_the_title() -> None:
    """It must not cover the prompt, or the buttons of a message."""

    async def main() -> None:
        client = ScriptedClient()
        app = ChatApp(client)
        async with app.run_test(size=(80, 24), notifications=True) as pilot:
            chat = Chatting(app, pilot, client)
            app.notify("Copied to the clipboard.")
            await chat.until(lambda: "Copied to the clipboard." in chat.lines()[0])
            assert not any("Copied" in line for line in chat.lines()[1:])

    asyncio.run(main())


@pytest.mark.parametrize("size", [(60, 15), (80, 24)])
def test_title_is_shortened_while_a_notification_is_beside_it(size: tuple[int, int]) -> None:
    title = "A comparison of the hearths and stoves of Europe in two centuries"

    async def main() -> None:
        client = ScriptedClient()
        client.engine.loads.set()
        app = ChatApp(client, chat=client.keep(title, "a question", "an answer"))
        async with app.run_test(size=size, notifications=True) as pilot:
            chat = Chatting(app, pilot, client)
            whole = f" {title}"[: size[0] - 3]
            await chat.until(lambda: chat.lines()[0].startswith(whole))
            app.notify("word " * 40, timeout=60)
            await chat.until(lambda: "word word" in chat.lines()[0])
            shown, _, _ = chat.lines()[0].partition("▌")
            assert shown == f" {title}"[: size[0] // 2 - 2] + "… "
            await pilot.click("Toast")
            await chat.until(lambda: chat.lines()[0].startswith(whole))

    asyncio.run(main())


def test_notification_without_a_remedy_has_no_empty_line() -> None:
    async def main() -> None:
        client = ScriptedClient()
        app = ChatApp(client)
        async with app.run_test(size=(80, 24), notifications=True) as pilot:
            chat = Chatting(app, pilot, client)
            app.notify("", title="/home/ann/a-folder-with-a-long-name/x.md: no such folder", severity="error")
            await chat.until(lambda: any("no such folder" in line for line in chat.lines()))
            shown = [line.partition("▌")[2].strip() for line in chat.lines() if "▌" in line]
            assert shown == ["/home/ann/a-folder-with-a-long-name/", "x.md: no such folder"]

    asyncio.run(main())
