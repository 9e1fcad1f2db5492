"""A child process that runs during a measurement, and ends with the `with` block that started it."""

import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn, TypeVar

from app.bench.competitor import CompetitorFailed

_START_SECONDS = 600.0  # seconds; enough for a large model on a slow disk
_STOP_SECONDS = 5.0
_POLL_SECONDS = 0.02
_TAIL_BYTES = 1500

T = TypeVar("T")


class Child:
    """A running program. Its output goes to a file, and error messages quote the end of that file."""

    def __init__(self, name: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self.process = process
        self._name = name
        self._log = log

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_for(self, ready: Callable[[], T | None]) -> T:
        """Call `ready` repeatedly until it returns a true value, and return that value.

        Raises CompetitorFailed if the child ends first.
        """
        deadline = time.monotonic() + _START_SECONDS
        while not (answer := ready()):
            if self.process.poll() is not None:
                self.fail(f"ended with status {self.process.returncode}")
            if time.monotonic() > deadline:
                self.fail(f"is not ready after {_START_SECONDS:.0f} s")
            time.sleep(_POLL_SECONDS)
        return answer

    def fail(self, what: str) -> NoReturn:
        """Raise CompetitorFailed with the end of the child's output."""
        output = self._log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").strip()
        raise CompetitorFailed(f"{self._name} {what}" + (f". Its output:\n{output}" if output else ""))


@contextmanager
def child(
    name: str,
    command: Sequence[str | Path],
    *,
    stdin: int = subprocess.DEVNULL,
    stdout: int | None = None,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Child]:
    """Start a program, and end it after the body. Raises CompetitorFailed if it does not start.

    `stdout`: where its output goes instead of the log file.
    """
    with tempfile.TemporaryDirectory(prefix="ingle-bench-") as folder:
        log = Path(folder, "log")
        with log.open("wb") as output:
            out = output if stdout is None else stdout
            try:
                process = subprocess.Popen(command, stdin=stdin, stdout=out, stderr=output, cwd=cwd, env=environment)
            except OSError as problem:
                raise does_not_start(command, problem) from problem
            try:
                yield Child(name, process, log)
            finally:
                _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ask the program to end, wait, then kill it. A second Ctrl-C skips the wait."""
    try:
        process.terminate()
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:
        process.kill()
        with suppress(BrokenPipeError), process:  # input that the child did not read may be left in the pipe
            pass


def does_not_start(command: Sequence[str | Path], problem: OSError) -> CompetitorFailed:
    """Return the error for a program that the operating system cannot start."""
    return CompetitorFailed(f"{command[0]} does not start: {problem.strerror}")
