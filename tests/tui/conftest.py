"""Fixtures for all tests of the screens."""

import pytest


@pytest.fixture(autouse=True)
def true_color(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the chat a terminal with all colors, independent of the terminal that runs the tests."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLORTERM", "truecolor")
