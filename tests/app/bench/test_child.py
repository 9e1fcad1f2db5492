"""Child programs: their start, their end, and errors that quote their output."""

import os
import sys
from pathlib import Path

import pytest

from app.bench.child import child
from app.bench.competitor import CompetitorFailed

READY = "open('ready', 'w').close(); time.sleep(600)"
STUBBORN = f"import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); {READY}"


def python(statement: str) -> list[str]:
    return [sys.executable, "-u", "-c", statement]


def test_missing_program_is_an_error() -> None:
    with (
        pytest.raises(CompetitorFailed, match="/no/such/program does not start: No such file"),
        child("it", ["/no/such/program"]),
    ):
        pass


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_child_ends_when_its_block_raises(error: type[BaseException]) -> None:
    with pytest.raises(error), child("sleeper", python("import time; time.sleep(600)")) as sleeper:  # noqa: PT012
        os.kill(sleeper.pid, 0)  # raises if the program does not run
        raise error
    with pytest.raises(ProcessLookupError):
        os.kill(sleeper.pid, 0)


def test_child_is_terminated_before_it_is_killed(tmp_path: Path) -> None:
    """The program receives SIGTERM before SIGKILL."""
    tidy = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(open('tidy', 'w').close()))"
    with child("tidy", python(f"{tidy}; {READY}"), cwd=tmp_path) as process:
        process.wait_for((tmp_path / "ready").exists)
    assert (tmp_path / "tidy").exists()


def test_child_that_ignores_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("app.bench.child._STOP_SECONDS", 0.1)
    with child("stubborn", python(STUBBORN), cwd=tmp_path) as stubborn:
        stubborn.wait_for((tmp_path / "ready").exists)
    with pytest.raises(ProcessLookupError):
        os.kill(stubborn.pid, 0)


def test_error_quotes_output_of_dead_child() -> None:
    with (
        pytest.raises(CompetitorFailed, match=r"dying ended(?s:.*)no such model"),
        child("dying", python("import sys; sys.exit('no such model')")) as process,
    ):
        process.wait_for(lambda: None)


def test_child_that_is_not_ready_in_time_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.bench.child._START_SECONDS", 0.1)
    with (
        pytest.raises(CompetitorFailed, match="slow is not ready after"),
        child("slow", python("import time; time.sleep(600)")) as process,
    ):
        process.wait_for(lambda: None)
