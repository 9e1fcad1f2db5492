"""Tests for the confirmation of downloads that are large or do not fit."""

import pytest

from tests.tui.pilots import Chatting, run
from tests.tui.scripted_client import FITS, KNOWN, LARGE, ScriptedClient
from tui.engine_types import ModelInfo
from tui.large_downloads import describe_download, needs_confirmation
from tui.screens.chat import ChatScreen
from tui.screens.dialog import Confirm
from tui.screens.models import ModelsScreen
from tui.widgets.listing import Listing

GB = 1_000_000_000
SMALL = ModelInfo("small", size=GB // 2, fits=True)


@pytest.mark.parametrize(
    ("model", "free", "is_asked"),
    [
        (SMALL, 100 * GB, False),
        (SMALL, None, False),
        (SMALL, GB // 3, True),
        (ModelInfo("small", size=GB // 2, fits=False), 100 * GB, True),
        (ModelInfo("small", size=GB // 2), 100 * GB, False),
        (ModelInfo("large", size=2 * GB, fits=True), 100 * GB, True),
        (ModelInfo("large", size=2 * GB, fits=True, arrived=3 * GB // 2), 100 * GB, False),
        (ModelInfo("large", size=2 * GB, fits=False, arrived=3 * GB // 2), 100 * GB, True),
        (ModelInfo("unknown"), 100 * GB, True),
        (ModelInfo("large", size=2 * GB, installed=True), 100 * GB, False),
        (ModelInfo("large", size=2 * GB, elsewhere=True), 100 * GB, False),
        (ModelInfo("large", size=2 * GB, fetching=True), 100 * GB, False),
    ],
)
def test_large_or_unfit_downloads_need_confirmation(model: ModelInfo, free: int | None, is_asked: bool) -> None:
    assert needs_confirmation(model, free) is is_asked


def test_question_states_size_disk_and_fit() -> None:
    assert describe_download(LARGE, 24 * GB, "does not fit: needs 44 GB").splitlines() == [
        "llama3.3:70b",
        "",
        "Size:      42.5 GB",
        "Free disk: 24.0 GB (not enough)",
        "Memory:    does not fit: needs 44 GB",
    ]
    paused = ModelInfo("m", size=2 * GB, is_estimate=True, arrived=GB // 2)
    assert describe_download(paused, None).splitlines()[2:] == [
        "Size:      about 2.0 GB, 500 MB downloaded",
        "Free disk: unknown",
        "Memory:    Fit unknown",
    ]


async def models_screen(chat: Chatting, row: int) -> None:
    await chat.pilot.press("f2")
    await chat.until(lambda: isinstance(chat.app.screen, ModelsScreen))
    listing = chat.app.screen.query_one(Listing)
    await chat.until(lambda: listing.row_count == 3)
    listing.move_cursor(row=row)


def test_too_large_model_is_downloaded_only_after_confirmation() -> None:
    client = ScriptedClient()

    async def flow(chat: Chatting) -> None:
        await models_screen(chat, 2)
        await chat.until(lambda: FITS[LARGE.name].verdict in chat.label("#fit"))
        await chat.pilot.press("enter")
        await chat.until(lambda: isinstance(chat.app.screen, Confirm) and chat.label(".about"))
        for words in ("llama3.3:70b", "42.5 GB", "24.5 GB (not enough)", FITS[LARGE.name].verdict):
            assert words in chat.label(".about")
        await chat.pilot.press("enter")  # presses the button that has the focus, which cancels
        await chat.until(lambda: isinstance(chat.app.screen, ModelsScreen))
        await chat.pilot.press("enter")
        await chat.until(lambda: isinstance(chat.app.screen, Confirm))
        assert client.models.pulled == []
        await chat.pilot.press("tab", "enter")
        await chat.until(lambda: client.models.pulled == [LARGE.name])

    run(client, flow)


def test_small_terminal_shows_the_whole_question() -> None:
    async def flow(chat: Chatting) -> None:
        await models_screen(chat, 2)
        await chat.until(lambda: FITS[LARGE.name].verdict in chat.label("#fit"))
        await chat.pilot.press("enter")
        await chat.until(lambda: isinstance(chat.app.screen, Confirm) and chat.label(".about"))
        words = ("Download this model?", LARGE.name, "Free disk", FITS[LARGE.name].verdict, "Cancel", "Download")
        await chat.until(lambda: all(any(word in line for line in chat.lines()) for word in words))

    run(ScriptedClient(), flow, size=(60, 15))


def test_small_model_is_downloaded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tui.large_downloads.LARGE", 3 * GB)
    client = ScriptedClient()

    async def flow(chat: Chatting) -> None:
        await models_screen(chat, 1)
        await chat.pilot.press("enter")
        await chat.until(lambda: client.models.pulled == [KNOWN.name])

    run(client, flow)


def test_load_command_asks_before_a_large_download() -> None:
    client = ScriptedClient()

    async def flow(chat: Chatting) -> None:
        for name in (KNOWN.name, "someone/unheard-of"):
            await chat.type(f"/load {name}")
            await chat.until(lambda: isinstance(chat.app.screen, Confirm) and chat.label(".about"))
            await chat.pilot.press("escape")
            await chat.until(lambda: isinstance(chat.app.screen, ChatScreen))
        assert client.models.loaded == []
        await chat.type(f"/load {KNOWN.name}")
        await chat.until(lambda: isinstance(chat.app.screen, Confirm))
        await chat.pilot.press("tab", "enter")
        await chat.until(lambda: client.models.loaded == [KNOWN.name])
        await chat.type("/load smollm2:135m")
        await chat.until(lambda: client.models.loaded == [KNOWN.name, "smollm2:135m"])

    run(client, flow)
