"""A program that runs beside this one while it is measured, and ends with it: by its end, an error, or Ctrl-C."""

import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NoReturn, TypeVar, cast

from app.bench.contender import ContenderFailed

_START_SECONDS = 600.0  # a large model from a slow disk
_STOP_SECONDS = 5.0
_POLL_SECONDS = 0.02
_TAIL_BYTES = 1500

T = TypeVar("T")


class Child:
    """A running program. What it says goes to a file, except for what is asked of it through pipes."""

    def __init__(self, name: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self._name = name
        self._process = process
        self._log = log

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, line: bytes) -> bytes:
        """Send a line and wait for one in return. For a child with pipes. Raises ContenderFailed when it ends."""
        try:
            stdin = cast(IO[bytes], self._process.stdin)
            stdin.write(line + b"\n")
            stdin.flush()
        except BrokenPipeError:
            self.fail("ended")
        return self.listen()

    def listen(self) -> bytes:
        """The next line that it says."""
        line = cast(IO[bytes], self._process.stdout).readline()
        if not line.endswith(b"\n"):
            self.fail("ended")
        return line

    def wait_for(self, ready: Callable[[], T | None]) -> T:
        """Ask again and again until there is an answer. Raises ContenderFailed when the child ends before."""
        deadline = time.monotonic() + _START_SECONDS
        while not (answer := ready()):
            if self._process.poll() is not None:
                self.fail(f"ended with status {self._process.returncode}")
            if time.monotonic() > deadline:
                self.fail("does not get ready")
            time.sleep(_POLL_SECONDS)
        return answer

    def fail(self, what: str) -> NoReturn:
        """Raise ContenderFailed with the last things that the child said."""
        said = self._log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").strip()
        raise ContenderFailed(f"{self._name} {what}" + (f"; it said:\n{said}" if said else ""))


@contextmanager
def child(
    name: str,
    command: Sequence[str | Path],
    *,
    pipes: bool = False,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Child]:
    """Start a program, and end it with the body. Raises ContenderFailed if it does not start."""
    with tempfile.TemporaryDirectory(prefix="ingle-bench-") as folder:
        log = Path(folder, "log")
        with log.open("wb") as said:
            stdin, stdout = (subprocess.PIPE, subprocess.PIPE) if pipes else (subprocess.DEVNULL, said)
            try:
                process = subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=said, cwd=cwd, env=environment)
            except OSError as problem:
                raise does_not_start(command, problem) from problem
            try:
                yield Child(name, process, log)
            finally:
                _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Politely, then not. A second Ctrl-C does not wait."""
    try:
        process.terminate()
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:
        process.kill()
        with suppress(BrokenPipeError), process:  # the pipe may hold what the child did not live to read
            pass


def output_of(command: Sequence[str | Path]) -> str:
    """What a program writes to stdout until it ends well. Raises ContenderFailed if it does not."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    except OSError as problem:
        raise does_not_start(command, problem) from problem
    if done.returncode:
        said = done.stderr[-_TAIL_BYTES:].decode(errors="replace").strip()
        raise ContenderFailed(f"{command[0]} ended with status {done.returncode}; it said:\n{said}")
    return done.stdout.decode(errors="replace")


def does_not_start(command: Sequence[str | Path], problem: OSError) -> ContenderFailed:
    """The error for a program that the system refuses to run."""
    return ContenderFailed(f"{command[0]} does not start: {problem.strerror}")
