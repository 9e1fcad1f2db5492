"""Tests for preferences of the user."""

import asyncio
from pathlib import Path

import pytest

from app.chat_backend.client import ChatPreferences
from app.settings.settings import config_file, load_settings
from tui.client import ClientError


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("INGLE_THEME", raising=False)


def test_saved_theme_is_used_at_the_next_start() -> None:
    assert load_settings().theme == "auto"
    asyncio.run(ChatPreferences().save_theme("hearth-light"))
    assert load_settings().theme == "hearth-light"


def test_unreadable_config_is_reported_and_left_unchanged() -> None:
    config_file().parent.mkdir(parents=True)
    config_file().write_text("theme = [", encoding="utf-8")
    with pytest.raises(ClientError, match=r"config\.toml"):
        asyncio.run(ChatPreferences().save_theme("hearth-light"))
    assert config_file().read_text(encoding="utf-8") == "theme = ["
