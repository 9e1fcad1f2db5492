"""Programs of others: run to their end for what they print, or kept running and asked line by line."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from app.bench.child import Child, child, does_not_start
from app.bench.competitor import CompetitorFailed

_TAIL_BYTES = 1500


class PipedChild:
    """A child that is asked through pipes."""

    def __init__(self, child: Child) -> None:
        self._child = child

    @property
    def pid(self) -> int:
        return self._child.pid

    def ask(self, line: bytes) -> bytes:
        """Send a line and wait for one in return. Raises CompetitorFailed when the child ends."""
        try:
            stdin = cast(IO[bytes], self._child.process.stdin)
            stdin.write(line + b"\n")
            stdin.flush()
        except BrokenPipeError:
            self._child.fail("ended")
        return self.listen()

    def listen(self) -> bytes:
        """The next line of the child. Raises CompetitorFailed when it ends."""
        line = cast(IO[bytes], self._child.process.stdout).readline()
        if not line.endswith(b"\n"):
            self._child.fail("ended")
        return line


@contextmanager
def piped_child(name: str, command: Sequence[str | Path]) -> Iterator[PipedChild]:
    """Start a program, and end it after the body. Raises CompetitorFailed if it does not start."""
    with child(name, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield PipedChild(process)


def output_of(command: Sequence[str | Path]) -> str:
    """What a program writes to stdout. Raises CompetitorFailed if it fails."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    except OSError as problem:
        raise does_not_start(command, problem) from problem
    if done.returncode:
        said = done.stderr[-_TAIL_BYTES:].decode(errors="replace").strip()
        raise CompetitorFailed(f"{command[0]} ended with status {done.returncode}; it said:\n{said}")
    return done.stdout.decode(errors="replace")
