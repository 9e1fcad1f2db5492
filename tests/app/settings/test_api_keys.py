"""API keys in files: file permissions, valid keys, and errors that do not show a key."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from app.errors import InvalidSetting
from app.settings import settings
from app.settings.api_keys import chosen_keys, make_own_key, own_key, own_key_file
from app.settings.settings import Settings, load_settings

SECRET = "sk-0123456789-secret"  # noqa: S105


@pytest.fixture(autouse=True)
def _own_world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("INGLE_API_KEY", "INGLE_API_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("INGLE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr(settings, "config_file", lambda: tmp_path / "config.toml")
    monkeypatch.setattr("app.settings.api_keys.config_file", lambda: tmp_path / "config.toml")


def settings_with(tmp_path: Path, content: str, mode: int = 0o600, **flags: Any) -> Settings:
    file = tmp_path / "keys"
    file.write_text(content)
    file.chmod(mode)
    return load_settings(api_key_file=str(file), **flags)


def test_keys_come_from_the_variable_and_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGLE_API_KEY", f"{SECRET}, another")
    settings = settings_with(tmp_path, f"# of the editor\n  third  \n\n{SECRET}\n")
    assert chosen_keys(settings) == (SECRET, "another", "third")
    assert SECRET not in repr(settings)
    monkeypatch.delenv("INGLE_API_KEY")
    assert chosen_keys(load_settings()) == ()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o602, 0o777])
def test_key_file_with_open_permissions_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(InvalidSetting, match="other users can access") as refused:
        chosen_keys(settings_with(tmp_path, SECRET, mode))
    assert refused.value.remedy.startswith("chmod 600 ")


def test_key_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, stranger = settings_with(tmp_path, SECRET), os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: stranger)
    real = Path.stat
    owned = lambda path, **options: os.stat_result((*real(path)[:4], stranger + 1, *real(path)[5:]))  # noqa: E731
    monkeypatch.setattr(Path, "stat", owned)
    with pytest.raises(InvalidSetting, match="other users can access"):
        chosen_keys(settings)


@pytest.mark.parametrize("content", ["", "# nothing\n", f"{SECRET} é\n", f"{SECRET}\x00\n", f"{'k' * 513}{SECRET}"])
def test_invalid_key_is_refused_and_not_shown(tmp_path: Path, content: str) -> None:
    with pytest.raises(InvalidSetting) as refused:
        chosen_keys(settings_with(tmp_path, content))
    assert SECRET not in str(refused.value) + refused.value.remedy


def test_invalid_key_in_the_environment_variable_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGLE_API_KEY", f"{SECRET}\x7f")
    with pytest.raises(InvalidSetting, match="INGLE_API_KEY") as refused:
        load_settings()
    assert SECRET not in str(refused.value) + refused.value.remedy


@pytest.mark.parametrize("place", ["none", "folder"])
def test_error_names_a_missing_key_file(tmp_path: Path, place: str) -> None:
    (tmp_path / "folder").mkdir(0o700)
    with pytest.raises(InvalidSetting, match=place):
        chosen_keys(load_settings(api_key_file=str(tmp_path / place)))


def test_key_in_config_toml_needs_a_private_file(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(f'api_key = ["{SECRET}"]\n')
    file.chmod(0o644)
    with pytest.raises(InvalidSetting, match="other users can access"):
        chosen_keys(load_settings())
    file.chmod(0o600)
    assert chosen_keys(load_settings()) == (SECRET,)


def test_own_key_is_generated_once_in_a_private_file() -> None:
    settings = load_settings()
    assert own_key(settings) is None
    before = os.umask(0)
    try:
        key = make_own_key(settings)
    finally:
        os.umask(before)
    file = own_key_file(settings)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert own_key(settings) == make_own_key(settings) == key
    assert len(key) >= 32
    file.chmod(0o644)  # makes the key unsafe, because another user may have read it
    assert make_own_key(settings) != key
