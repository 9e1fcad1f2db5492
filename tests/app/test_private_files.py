"""Cache and settings files are private to the user."""

import os
import stat
from pathlib import Path

import pytest

from app.generation.reply_token_cache import ReplyTokenCache
from app.settings.config_file import write_setting
from engine.backends.cpu.code_cache import why_not_cached
from engine.backends.cuda.tile_file import write_tiles
from quant.cpu.tiers import choose
from tests.app.generation.test_reply_token_cache import generated, remember
from tests.engine.backends.cuda.test_tile_file import CARD, TILES
from tests.support.processes import HANGING_SECONDS


def test_files_and_folders_are_private_under_any_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    before = os.umask(0)
    try:
        assert why_not_cached(tmp_path / "cache" / "inglenook", choose("auto")) == ""
        write_tiles(tmp_path / "tiles" / "inglenook", CARD, TILES)
        write_setting("threads", "2")
        reply_tokens = ReplyTokenCache(tmp_path / "kv" / "inglenook")
        remember(reply_tokens, generated(1))
        assert reply_tokens.flush(HANGING_SECONDS)
    finally:
        os.umask(before)
    made = {path.relative_to(tmp_path): stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    assert len(made) > 12
    assert {path: oct(mode) for path, mode in made.items() if mode & 0o077} == {}
