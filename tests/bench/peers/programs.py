"""Run external programs: until they exit, for their output, or as a child process that answers line by line."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from app.bench.child import Child, child, does_not_start
from app.bench.competitor import CompetitorFailed

_TAIL_BYTES = 1500


class PipedChild:
    """A child process that answers requests through pipes."""

    def __init__(self, child: Child) -> None:
        self._child = child

    @property
    def pid(self) -> int:
        return self._child.pid

    def ask(self, line: bytes) -> bytes:
        """Send a line and return the line that answers it. Raises CompetitorFailed if the child ends."""
        try:
            stdin = cast(IO[bytes], self._child.process.stdin)
            stdin.write(line + b"\n")
            stdin.flush()
        except BrokenPipeError:
            self._child.fail("ended")
        return self.read_line()

    def read_line(self) -> bytes:
        """Return the next line of the child. Raises CompetitorFailed if it ends."""
        line = cast(IO[bytes], self._child.process.stdout).readline()
        if not line.endswith(b"\n"):
            self._child.fail("ended")
        return line


@contextmanager
def piped_child(name: str, command: Sequence[str | Path]) -> Iterator[PipedChild]:
    """Start a program, and end it when the `with` block ends. Raises CompetitorFailed if it does not start."""
    with child(name, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield PipedChild(process)


def output_of(command: Sequence[str | Path], *, with_errors: bool = False) -> str:
    """Return the standard output of a program, followed by its error output if asked. Raises CompetitorFailed if the
    program fails.
    """
    try:
        result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    except OSError as problem:
        raise does_not_start(command, problem) from problem
    if result.returncode:
        error_output = result.stderr[-_TAIL_BYTES:].decode(errors="replace").strip()
        raise CompetitorFailed(f"{command[0]} ended with status {result.returncode}:\n{error_output}")
    output = result.stdout + result.stderr if with_errors else result.stdout
    return output.decode(errors="replace")
