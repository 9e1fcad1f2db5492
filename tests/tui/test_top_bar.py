"""Tests for the top bar."""

import asyncio

import pytest
from textual.app import App, ComposeResult

from tui.engine_types import Loading
from tui.widgets.top_bar import TopBar

PLACE = "/home/ann/models/Model.gguf"


class Barred(App[None]):
    def compose(self) -> ComposeResult:
        yield TopBar()


@pytest.mark.parametrize(
    ("model", "loading", "shown"),
    [
        ("smollm2:135m", None, "smollm2:135m  http://localhost/v1"),
        (PLACE, None, "Model.gguf  http://localhost/v1"),
        (PLACE, Loading(PLACE, f"Loading {PLACE} (98.4 MB)", 0.5), "50%, Loading Model.gguf (98.4 MB)  http://localhost/v1"),
        ("", Loading(PLACE, "Waiting for memory"), "Model.gguf: Waiting for memory  http://localhost/v1"),
    ],
)  # fmt: skip
def test_bar_shows_the_model(model: str, loading: Loading | None, shown: str) -> None:
    async def show() -> None:
        async with Barred().run_test(size=(90, 24)) as pilot:
            bar = pilot.app.query_one(TopBar)
            bar.model, bar.loading_model, bar.address = model, loading, "http://localhost/v1"
            assert bar.render().plain == f" {'New chat'.ljust(88 - len(shown))}{shown} "

    asyncio.run(show())


def test_bar_shows_that_chats_are_not_saved() -> None:
    async def show() -> None:
        async with Barred().run_test(size=(30, 24)) as pilot:
            bar = pilot.app.query_one(TopBar)
            bar.model, bar.chat_title, bar.is_saved = "smollm2:135m", "A title that is too long", False
            assert bar.render().plain == " Not saved: A t… smollm2:135m "

    asyncio.run(show())
