"""`ingle pull` of several models, and a download that another process stops."""

import time
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from app.commands import pull as command
from app.commands.pull import pull
from app.errors import AppError, DownloadStopped, exit_status
from app.models.stored_model import StoredModel
from app.models.transfer.download_turn import DownloadTurn
from app.progress import Progress, SilentProgress
from app.settings.settings import Settings


@pytest.fixture
def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.setenv("INGLE_MODELS_DIR", str(tmp_path / "models"))
    return lambda *words: CliRunner().invoke(pull, [str(word) for word in words])


def test_pull_prints_a_path_per_model(invoke: Callable[..., Result], tmp_path: Path) -> None:
    files = [tmp_path / "one.gguf", tmp_path / "two.gguf"]
    for file in files:
        file.touch()
    answer = invoke(*files)
    assert answer.exit_code == 0
    assert answer.stdout.splitlines() == [str(file) for file in files]
    assert answer.stderr.count(" is ready: ") == 2


def test_stop_ends_the_running_download(invoke: Callable[..., Result], tmp_path: Path) -> None:
    assert isinstance(invoke("--stop").exception, AppError)  # no download is running

    def download() -> None:
        with DownloadTurn(tmp_path / "models", "org/repo").hold(SilentProgress()) as progress:
            with progress.task("Downloading it", 100):
                assert "The download of org/repo (pid " in invoke("--stop").stderr
            with progress.task("Downloading more", 100):  # the download is stopped at its next progress report
                pass

    with pytest.raises(DownloadStopped) as caught:
        download()
    assert exit_status(caught.value) == 130


def test_interrupted_pull_reports_that_the_downloaded_part_is_kept(
    invoke: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "pull_model", interrupted)
    answer = invoke("org/repo")
    assert isinstance(answer.exception, click.Abort | KeyboardInterrupt | SystemExit)
    assert "The part that has arrived is kept" in answer.stderr
    assert "The part that has arrived is kept" not in invoke("-q", "org/repo").stderr


@pytest.mark.parametrize(
    ("driver", "device", "is_new", "prepared"),
    [("580.65", "auto", True, 1), (None, "auto", True, 0), ("580.65", "cpu", True, 0), ("580.65", "auto", False, 0)],
)
def test_kernels_of_a_new_model_are_compiled_if_there_is_a_gpu(
    invoke: Callable[..., Result],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    driver: str | None,
    device: str,
    is_new: bool,
    prepared: int,
) -> None:
    path, compiled = tmp_path / "it.gguf", list[StoredModel]()
    path.touch()

    def download(name: str, settings: Settings, progress: Progress) -> StoredModel:
        if is_new:
            path.chmod(0o600)  # changes the time of the file, as a download does
        return StoredModel(name, path, 0, None, "Hub", None, None)

    monkeypatch.setenv("INGLE_DEVICE", device)
    monkeypatch.setattr(command, "pull_model", download)
    monkeypatch.setattr("engine.backends.cuda.driver.driver_version", lambda: driver)
    monkeypatch.setattr("app.models.load.loaded_model.compile_for_gpu", lambda stored, *others: compiled.append(stored))
    time.sleep(0.05)  # the clock of the file system is coarse
    assert invoke("it").exit_code == 0
    assert len(compiled) == prepared
