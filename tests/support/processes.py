"""Processes that tests start: they answer signals as in a terminal, and do not outlive the test."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import AnyStr

# So that what hangs fails. Nothing here measures time.
HANGING_SECONDS = 120.0


def until(condition: Callable[[], bool]) -> None:
    """Return once it holds; fail when it never does."""
    deadline = time.monotonic() + HANGING_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


def answer_signals() -> None:
    """Have this process and all that it starts answer Ctrl-C and hang-ups, even if both are ignored.

    nohup and the background jobs of a script ignore them, and programs inherit that.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    hang_up = getattr(signal, "SIGHUP", None)  # Windows has none
    if hang_up is not None and signal.getsignal(hang_up) is signal.SIG_IGN:
        # Programs do not inherit a handler. This one keeps the tests themselves alive, as nohup asks.
        signal.signal(hang_up, lambda *_: None)


class Started(subprocess.Popen[AnyStr]):
    """A process that is killed when the body of its `with` fails, or when it does not end after the body."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.kill()
        killing = threading.Timer(HANGING_SECONDS, self.kill)
        killing.start()
        try:
            super().__exit__(kind, error, trace)
        finally:
            killing.cancel()
            killing.join()


@contextmanager
def running_statement(statement: str) -> Iterator[int]:
    """The pid of a Python process that runs a statement, and has started."""
    command = [sys.executable, "-c", f"print(flush=True)\n{statement}"]
    with Started(command, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        running.stdout.readline()
        yield running.pid
        running.kill()


def assert_interrupt_ends_all(command: Sequence[str], children: int, cwd: Path, env: Mapping[str, str]) -> None:
    """Interrupt a benchmark once it warms up: it exits with status 130, and its child processes end with it."""
    with Started(command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stdout is not None
        assert any("Warming up" in line for line in process.stderr)
        pids = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(pids) == children
        process.send_signal(signal.SIGINT)
        status, said = process.wait(HANGING_SECONDS), process.stderr.read()
        assert status == 130, said
        assert "Traceback" not in said
        assert process.stdout.read() == ""
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
