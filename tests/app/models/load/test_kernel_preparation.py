"""The progress lines that appear while a model is loaded."""

import _thread
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from app.models.load import kernel_preparation
from app.models.load.kernel_preparation import StoppableProgress, loading, prepare_kernels
from app.models.stored_model import StoredModel
from app.progress import Report, SilentProgress, Unit
from engine.backends.device_choice import layouts_are_compiled
from engine.errors import LoadStopped
from engine.load_options import LoadControl, LoadOptions


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


def compile_for_ever(layouts: object, options: LoadOptions) -> None:
    """Write the process id to the code cache, and never end."""
    assert options.code_cache
    (options.code_cache / "pid").write_text(str(os.getpid()))
    time.sleep(600)


def has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("interrupt", [False, True], ids=["a stop", "Ctrl-C"])
def test_child_that_compiles_ends_with_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupt: bool
) -> None:
    monkeypatch.setattr(kernel_preparation, "_compile_quietly", compile_for_ever)
    stop, found = threading.Event(), list[int]()

    def end() -> None:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.01)
        found.append(int((tmp_path / "pid").read_text()))
        if interrupt:
            _thread.interrupt_main()
        else:
            stop.set()

    ending = threading.Thread(target=end)
    ending.start()
    options = LoadOptions(code_cache=tmp_path, control=LoadControl(stop.is_set))
    with pytest.raises(KeyboardInterrupt if interrupt else LoadStopped):
        prepare_kernels(frozenset(), options, SilentProgress())
    ending.join()
    assert has_ended(found[0])


@pytest.mark.slow
def test_kernels_are_compiled_by_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process compiles nothing."""
    monkeypatch.setattr(kernel_preparation, "compile_layouts", None)
    options = LoadOptions(code_cache=tmp_path)
    assert not layouts_are_compiled(frozenset(), options)
    prepare_kernels(frozenset(), options, SilentProgress())
    assert layouts_are_compiled(frozenset(), options)


def test_failed_child_is_replaced_by_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []
    monkeypatch.setattr(kernel_preparation, "_compile_quietly", fail)
    monkeypatch.setattr(kernel_preparation, "compile_layouts", lambda layouts, options: done.append(os.getpid()))
    prepare_kernels(frozenset(), LoadOptions(code_cache=tmp_path), SilentProgress())
    assert done == [os.getpid()]


def fail(layouts: object, options: LoadOptions) -> None:
    os._exit(1)


def test_stopped_load_raises_at_the_next_report() -> None:
    stop, progress = threading.Event(), Listed()
    stoppable = StoppableProgress(progress, LoadControl(stop.is_set))
    with stoppable.task("Hashing", 3) as report:
        report(1)
        stop.set()
        with pytest.raises(LoadStopped):
            report(2)
    with pytest.raises(LoadStopped), stoppable.task("Loading", 3):
        pass
    assert progress.lines == ["Hashing 3", "1", "done"]
