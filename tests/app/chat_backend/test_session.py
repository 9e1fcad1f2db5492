"""Tests for the colors with which the chat starts."""

import pytest

from app.chat_backend import session
from app.chat_backend.session import has_dark_theme


@pytest.mark.parametrize(
    ("theme", "asks", "is_dark"), [("auto", 1, False), ("hearth-light", 0, True), ("nord", 0, True)]
)
def test_terminal_is_asked_for_its_background_only_without_a_theme(
    theme: str, asks: int, is_dark: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def is_background_dark(stated: str) -> bool:
        asked.append(stated)
        return False

    monkeypatch.setattr(session, "is_background_dark", is_background_dark)
    assert has_dark_theme(theme) is is_dark
    assert len(asked) == asks
