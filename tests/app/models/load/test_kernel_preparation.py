"""The progress lines that appear while a model is loaded."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from app.models.load import kernel_preparation
from app.models.load.kernel_preparation import loading, prepare_kernels
from app.models.stored_model import StoredModel
from app.progress import Report, Unit
from engine.load_options import LoadOptions


class Listed:
    """Records the progress as lines of text."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    @contextmanager
    def task(self, label: str, total: int | None, *, unit: Unit = "bytes") -> Iterator[Report]:
        self.lines.append(f"{label} {total}")
        yield lambda done: self.lines.append(str(done))
        self.lines.append("done")

    def say(self, line: str) -> None:
        raise AssertionError(line)


def test_preparation_after_loading_is_a_separate_task(tmp_path: Path) -> None:
    progress = Listed()
    with loading(StoredModel("it", tmp_path, 30, None, "", None, None), progress) as reports:
        reports.read(10, 20)
        reports.read(20, 20)
        assert progress.lines == ["Loading it 30", "10", "20", "done", "Preparing it for this machine None"]
    assert progress.lines[-1] == "done"


def test_compilation_for_a_gpu_is_a_separate_task_during_the_preparation(tmp_path: Path) -> None:
    progress = Listed()
    with loading(StoredModel("it", tmp_path, 30, None, "", None, None), progress) as reports:
        reports.read(20, 20)
        for done in range(3):
            reports.compiled(done, 2)
    preparing = ["Preparing it for this machine None", "done"]
    compiling = ["Compiling kernels for this GPU 2", "0", "1", "2", "done"]
    assert progress.lines == ["Loading it 30", "20", "done", *preparing, *compiling, *preparing]


@pytest.mark.parametrize("problem", ["", "/cache (Read-only file system)"])
def test_kernels_that_cannot_be_saved_are_reported_once(monkeypatch: pytest.MonkeyPatch, problem: str) -> None:
    progress, said = Listed(), list[str]()
    monkeypatch.setattr(progress, "say", said.append)
    monkeypatch.setattr(kernel_preparation, "layouts_are_compiled", lambda layouts, options: False)
    monkeypatch.setattr(kernel_preparation, "compile_layouts", lambda layouts, options: None)
    monkeypatch.setattr(kernel_preparation, "why_code_is_not_cached", lambda options: problem)
    prepare_kernels(frozenset(), LoadOptions(), progress)
    if problem:
        [line] = said
        assert line.startswith("Compiled kernels cannot be saved in /cache (Read-only file system)")
        assert "INGLE_CACHE_DIR" in line
        assert progress.lines[0] == "Preparing the CPU engine None"
    else:
        assert said == []
        assert progress.lines[0] == "Preparing the CPU engine, once on this machine (about a minute) None"
