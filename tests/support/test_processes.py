"""Processes that tests start handle signals and end with the test."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import processes
from tests.support.processes import Started, answer_signals

ROOT = Path(__file__).parents[2]
NAMES = ("SIGINT", "SIGHUP")
ANSWERS = f"import signal; print(*(signal.getsignal(getattr(signal, name)) is signal.SIG_IGN for name in {NAMES}))"
SLEEPING = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]


def test_started_programs_handle_signals_that_were_ignored() -> None:
    before = {name: signal.signal(getattr(signal, name), signal.SIG_IGN) for name in NAMES}
    try:
        answer_signals()
        output = subprocess.check_output([sys.executable, "-S", "-c", ANSWERS], text=True)
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)
    assert output.split() == ["False", "False"]


def test_pytest_process_keeps_the_default_sigint_handler() -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_process_is_killed_if_the_with_body_fails() -> None:
    with pytest.raises(LookupError), Started(SLEEPING) as process:
        raise LookupError
    assert process.returncode == -signal.SIGKILL


def test_hung_process_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "HANGING_SECONDS", 0.1)
    with Started(SLEEPING) as process:
        pass
    assert process.returncode == -signal.SIGKILL


HANGING_TEST = """
import threading
def test_first(): pass
def test_hangs():
    try:
        threading.Event().wait()
    finally:
        threading.Event().wait()
def test_last(): pass
"""


def test_hung_test_fails_and_other_tests_run(tmp_path: Path) -> None:
    """The timer interrupts both waits of the hung test, one after the other."""
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\ntimeout = 5\n")
    imported = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom tests.support.timeouts import pytest_timeout_set_timer\n"
    )
    (tmp_path / "conftest.py").write_text(imported)
    (tmp_path / "test_it.py").write_text(HANGING_TEST)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(tmp_path)]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=processes.HANGING_SECONDS
    )
    assert "1 failed, 2 passed" in done.stdout, done.stdout
    assert "test_it.py::test_hangs" in done.stdout
