"""Fixtures for all tests of the screens."""

import asyncio
import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest
import textual.app
import textual.pilot
import textual.screen
from textual.css.model import RuleSet
from textual.css.stylesheet import Stylesheet


@pytest.fixture(scope="session", autouse=True)
def parsed_styles() -> Iterator[None]:
    """Parse each style sheet once for each theme, because every test starts a chat with the same style sheets."""
    parsed: dict[tuple[Any, ...], list[RuleSet]] = {}
    parse = Stylesheet._parse_rules

    def parse_once(sheet: Stylesheet, css: str, *given: Any, **named: Any) -> list[RuleSet]:
        key = (css, given, *sorted(named.items()), frozenset(sheet._variables.items()))
        if key not in parsed:
            parsed[key] = parse(sheet, css, *given, **named)
        return parsed[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stylesheet, "_parse_rules", parse_once)
        yield


async def wait_for_idle(min_sleep: float = 0, max_sleep: float = 10) -> None:
    """Wait until the process has used hardly any processor time in two intervals in a row.

    An interval that took longer does not count: the process may not have had a processor.
    """
    ends, quiet = time.monotonic() + max_sleep, 0
    while quiet < 2 and time.monotonic() < ends:
        began, cpu = time.monotonic(), time.process_time()
        await asyncio.sleep(0.0025)
        is_quiet = time.monotonic() - began < 0.005 and time.process_time() - cpu < 0.0005
        quiet = quiet + 1 if is_quiet else 0


@pytest.fixture(scope="session", autouse=True)
def short_waits() -> Iterator[None]:
    """Measure in intervals of 2.5 ms whether a chat is idle, because a pilot waits twice for each key."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(textual.app, "wait_for_idle", wait_for_idle)
        patch.setattr(textual.pilot, "wait_for_idle", wait_for_idle)
        patch.setattr(textual.screen, "UPDATE_PERIOD", 0.004)  # a chat that waits for its next frame is not idle
        yield


@pytest.fixture(autouse=True)
def _frozen_heap(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Exclude the objects of the test run from garbage collection again after a chat has included them.

    A full collection that visits them takes a second. `gc.get_freeze_count` visits them as well.
    """
    included: list[bool] = []
    unfreeze = gc.unfreeze

    def include() -> None:
        unfreeze()
        included.append(True)

    monkeypatch.setattr(gc, "unfreeze", include)
    yield
    if included:
        gc.collect()
        gc.freeze()


@pytest.fixture
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poll the engine and the chats of other windows every 0.2 s instead of each second."""
    monkeypatch.setattr("tui.screens.chat._POLL_SECONDS", 0.2)
    monkeypatch.setattr("tui.screens.engine._INTERVAL", 0.2)
    # this poll shows all changes, so that it would hide a change that an earlier poll does not show
    monkeypatch.setattr("tui.widgets.chat_list._AGE_POLL", 10_000)


# time limits of the chat, in seconds; confirmations still close sooner than other notices, which stay for 5 seconds
LIMITS = {
    "tui.widgets.escape_key._TWICE": 60.0,
    "tui.screens.chat._QUIT_SECONDS": 60.0,
    "tui.clipboard.SECONDS": 60.0,
    "tui.file_search.SECONDS": 60.0,
    "tui.app._BRIEF": 4.0,
    "tui.widgets.chat_view._BRIEF": 60.0,
}


@pytest.fixture(autouse=True)
def long_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the chat more time than its users have, so that a slow machine does not change what it does."""
    for name, seconds in LIMITS.items():
        monkeypatch.setattr(name, seconds)


@pytest.fixture(autouse=True)
def true_color(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the chat a terminal with all colors, independent of the terminal that runs the tests."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLORTERM", "truecolor")
