"""The models of the port: what somebody is told of who has none yet."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from app.cli import ingle
from app.config import Settings
from app.history.history import History
from app.models.families import load_families
from app.terminal_chat import hub_finds
from app.terminal_chat.client import TerminalClient
from tests.app.models.fake_hub import serve
from tests.engine.tiny_llama import make
from tui.engine_nouns import Model


async def said(*words: str) -> tuple[int, bytes, bytes]:
    """A command, run in this process."""
    result = await asyncio.to_thread(CliRunner().invoke, ingle, words)
    return result.exit_code, result.stdout.encode(), result.stderr.encode()


def recommended(settings: Settings, endpoint: str = "") -> Model | None:
    async def main() -> Model | None:
        client = TerminalClient(settings, History(None), {"stay": False}, endpoint)
        found = await client.models.recommended()
        await client.close()
        return found

    return asyncio.run(main())


def test_who_is_new_is_told_of_the_best_model_that_fits(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    families = load_families()
    content = make(tmp_path, head_dim=32).path.read_bytes()
    with serve() as hub:
        online = replace(settings, offline=False, hub_endpoint=hub.address)
        hub.repositories = {one.repository.repo: {"m-Q4_K_M.gguf": content} for one in families.recommended}
        monkeypatch.setattr(hub_finds, "_said", said)
        monkeypatch.setenv("INGLE_HUB_ENDPOINT", hub.address)
        monkeypatch.setenv("INGLE_HUB_CACHE", str(tmp_path / "hub"))
        found = recommended(online)
        assert found is not None
        assert found.name in {one.name for one in families.recommended}
        assert found.fit.startswith("fits: 512 context; needs ")
        asked = hub.sent
        assert recommended(settings) is None  # offline
        assert recommended(replace(online, origins={**online.origins, "model": "--model"})) is None
        assert recommended(online, "http://127.0.0.1:9/v1") is None
        assert hub.sent == asked
    assert recommended(online) is None  # nobody answers
