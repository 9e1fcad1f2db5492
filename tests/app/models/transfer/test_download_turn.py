"""One download at a time: a waiting process shows the progress of the running one, and runs when that ends."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import pytest

from app.errors import DownloadStopped
from app.models.transfer import download_turn
from app.models.transfer.download_turn import DownloadTurn, Running, ask_to_stop, running_download
from app.progress import Report, SilentProgress, Unit


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download_turn, "_POLL_SECONDS", 0.005)


class Display(SilentProgress):
    """Records the displayed progress. Sets `enough` when the amount 40 is displayed."""

    def __init__(self) -> None:
        self.seen: list[str | int] = []
        self.enough = threading.Event()

    @contextmanager
    def task(self, label: str, total: int | None, *, unit: Unit = "bytes") -> Iterator[Report]:
        self.seen.append(f"{label} ({total})")
        yield self._take
        self.seen.append("end")

    def _take(self, done: int) -> None:
        if self.seen[-1] != done:
            self.seen.append(done)
        if done == 40:
            self.enough.set()

    def say(self, line: str) -> None:
        self.seen.append(line)


def another(folder: Path, name: str, display: Display) -> "Future[None]":
    """Take the turn in another thread, which reports its progress to `display`."""

    def take() -> None:
        with DownloadTurn(folder, name).hold(display):
            pass

    return _apart(take)


def _apart(work: Callable[[], None]) -> "Future[None]":
    done: Future[None] = Future()

    def attempt() -> None:
        try:
            work()
            done.set_result(None)
        except DownloadStopped as problem:
            done.set_exception(problem)

    threading.Thread(target=attempt).start()
    return done


@pytest.mark.parametrize("name", ["mine", "other"])
def test_waiting_process_shows_progress_and_is_next(tmp_path: Path, name: str) -> None:
    display = Display()
    with (
        DownloadTurn(tmp_path, "mine").hold(SilentProgress()) as progress,
        progress.task("Downloading it", 100) as report,
    ):
        turn = another(tmp_path, name, display)
        while not display.enough.wait(0.01):
            report(40)
        assert running_download(tmp_path) == Running(os.getpid(), "mine", "Downloading it", 40, 100)
        assert not turn.done()
    turn.result()
    first = display.seen[0]
    assert isinstance(first, str)
    assert first.startswith("Another ingle" if name == "mine" else "other is next")
    assert display.seen[1] == "Downloading it (100)"
    assert display.seen[-2:] == [40, "end"]
    assert running_download(tmp_path) is None


@pytest.mark.parametrize("state", ["", "{}", '{"pid": 1, "name": "x", "label": "y", "done": 3, "total": null}'])
def test_progress_of_a_killed_download_is_not_shown(tmp_path: Path, state: str) -> None:
    with DownloadTurn(tmp_path, "mine").hold(SilentProgress()):
        pass
    [folder] = tmp_path.iterdir()
    (folder / "now.json").write_text(state)
    assert running_download(tmp_path) is None
    display = Display()
    with DownloadTurn(tmp_path, "mine").hold(display):
        assert display.seen == []


def test_stop_request_ends_running_and_waiting_downloads(tmp_path: Path) -> None:
    display, started = Display(), threading.Event()

    def download() -> None:
        with (
            DownloadTurn(tmp_path, "mine").hold(SilentProgress()) as progress,
            progress.task("Downloading it", 100) as report,
        ):
            started.set()
            while True:
                report(40)

    downloading = _apart(download)
    started.wait()
    waiting, other = another(tmp_path, "mine", display), another(tmp_path, "other", Display())
    display.enough.wait()
    ask_to_stop(tmp_path, "mine")
    for asked in (downloading, waiting):
        with pytest.raises(DownloadStopped, match="the download of mine was stopped"):
            asked.result()
    other.result()
    with DownloadTurn(tmp_path, "mine").hold(SilentProgress()) as progress, progress.task("Again", 1) as report:
        report(1)  # no error, because the earlier stop request no longer applies
