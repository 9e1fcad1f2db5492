"""Processes that tests start. They handle signals as in a terminal, and do not outlive the test."""

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

# Time limit in seconds of a wait that would otherwise hang. It is not a performance limit.
HANGING_SECONDS = 120.0


def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds. Fails after HANGING_SECONDS."""
    deadline = time.monotonic() + HANGING_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the condition never became true"
        time.sleep(0.005)


def answer_signals() -> None:
    """Make this process and its children handle Ctrl-C and SIGHUP, even if both are ignored.

    nohup and the background jobs of a script ignore these signals, and child processes inherit that.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    hang_up = getattr(signal, "SIGHUP", None)  # Windows has no SIGHUP
    if hang_up is not None and signal.getsignal(hang_up) is signal.SIG_IGN:
        # A handler is not inherited, so children handle SIGHUP by default. This process survives it, as under nohup.
        signal.signal(hang_up, lambda *_: None)


class Started(subprocess.Popen[AnyStr]):
    """A process that is killed if the body of its `with` fails, or if it does not exit after the body."""

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
    """Run a statement in a new Python process, and yield its pid after it has started."""
    command = [sys.executable, "-c", f"print(flush=True)\n{statement}"]
    with Started(command, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        running.stdout.readline()
        yield running.pid
        running.kill()


def assert_interrupt_ends_all(command: Sequence[str], children: int, cwd: Path, env: Mapping[str, str]) -> None:
    """Interrupt a benchmark during its warm-up. Checks that it exits with status 130 and ends its child processes."""
    with Started(command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stdout is not None
        assert any("Warming up" in line for line in process.stderr)
        pids = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(pids) == children
        process.send_signal(signal.SIGINT)
        status, errors = process.wait(HANGING_SECONDS), process.stderr.read()
        assert status == 130, errors
        assert "Traceback" not in errors
        assert process.stdout.read() == ""
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
