"""Fixtures for all tests of the screens."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
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


@pytest.fixture(autouse=True)
def _frozen_heap() -> Iterator[None]:
    """Exclude the objects of the test run from garbage collection again after a chat has included them.

    A full collection that visits them takes a second.
    """
    yield
    if gc.get_freeze_count() == 0:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def true_color(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the chat a terminal with all colors, independent of the terminal that runs the tests."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLORTERM", "truecolor")
