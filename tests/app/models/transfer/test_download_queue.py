"""The list of running, waiting, and unfinished downloads, and its order."""

from pathlib import Path

import pytest

from app.errors import Offline
from app.models.sources import pull
from app.models.store import ModelStore
from app.models.transfer import attempts
from app.models.transfer.download_queue import Download, DownloadState, downloads, queue_note
from app.models.transfer.download_turn import DownloadTurn
from app.progress import SilentProgress
from app.settings.settings import Settings
from tests.app.models.fake_hub import Mishap, serve
from tests.app.models.tiny_model import settings_in


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return settings_in(tmp_path)


def seen(settings: Settings) -> list[Download]:
    return downloads(ModelStore(settings).hub_models, settings.models_dir)


def test_downloads_are_in_the_order_of_requests(settings: Settings) -> None:
    assert seen(settings) == []
    with queue_note(settings.models_dir, ["org/a", "org/b"]) as first, queue_note(settings.models_dir) as second:
        second.add("org/c")
        with (
            DownloadTurn(settings.models_dir, "org/a").hold(SilentProgress()) as progress,
            progress.task("Downloading it", 100) as report,
        ):
            report(0)
            assert seen(settings) == [
                Download("org/a", DownloadState.RUNNING, 0, 100),
                Download("org/b", DownloadState.WAITING, 0, None),
                Download("org/c", DownloadState.WAITING, 0, None),
            ]
        first.done("org/a")
        second.done("what was never there")
        assert [fetch.name for fetch in seen(settings)] == ["org/b", "org/c"]
    assert seen(settings) == []
    assert not [path for path in settings.models_dir.rglob("*-*") if path.is_file()]


def test_note_of_a_killed_process_is_removed(settings: Settings) -> None:
    with queue_note(settings.models_dir, ["org/a"]):
        (note,) = settings.models_dir.rglob("*.json")
        left = note.with_name("0-1.json")
        left.write_bytes(note.read_bytes())
        assert [fetch.name for fetch in seen(settings)] == ["org/a"]
        assert not left.exists()
        note.write_text("[")
        assert seen(settings) == []


def test_unfinished_downloads_come_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "WAITS", ())
    with serve() as hub:
        settings = settings_in(tmp_path, hub_endpoint=hub.address)
        hub.repositories["org/Tiny"] = {"tiny-Q4_0.gguf": bytes(5000)}
        hub.mishaps.extend([Mishap(cut_at=1000), Mishap(status=503)])
        with pytest.raises(Offline):
            pull("org/Tiny", settings)
    left = Download("org/Tiny:Q4_0", DownloadState.STOPPED, 1000, 5000)
    assert seen(settings) == [left]
    with queue_note(settings.models_dir, ["org/Other", "org/Tiny"]):
        assert [(fetch.name, fetch.state) for fetch in seen(settings)] == [
            ("org/Other", DownloadState.WAITING),
            ("org/Tiny", DownloadState.WAITING),
        ]
