"""Run a program in a pseudo-terminal, and check the state of the terminal after the program exits."""

import fcntl
import os
import pty
import re
import select
import struct
import sys
import termios
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
HANGING_SECONDS = 60.0
_MODE = re.compile(rb"\x1b\[\?([0-9;]+)([hl])")
ON_AT_FIRST = frozenset({7, 25})  # private modes of a new terminal: line wrapping, and a visible cursor


@dataclass(frozen=True)
class Ended:
    """The state of the terminal after its program has exited."""

    status: int  # exit status as a shell reports it
    modes: frozenset[int]  # private modes that differ from those of a new terminal
    attributes_are_back: bool  # whether echo, line mode, and signals are restored
    output: bytes


class Terminal:
    """Runs one program in a pseudo-terminal."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self.master, slave = pty.openpty()
        self._slave = slave
        self._before = termios.tcgetattr(slave)
        self.output = b""
        self.pid = os.fork()
        if not self.pid:
            os.setsid()
            os.close(self.master)
            for descriptor in range(3):
                os.dup2(slave, descriptor)
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            os.chdir(ROOT)
            os.execve(command[0], list(command), {**os.environ, "TERM": "xterm-256color", **environment})  # noqa: S606

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def read_until(self, condition: Callable[[bytes], bool]) -> None:
        deadline = time.monotonic() + HANGING_SECONDS
        while not condition(self.output):
            assert time.monotonic() < deadline, self.output[-2000:]
            if select.select([self.master], [], [], 0.05)[0]:
                self.output += os.read(self.master, 65536)

    def ended(self) -> Ended:
        deadline = time.monotonic() + HANGING_SECONDS
        while True:
            if select.select([self.master], [], [], 0.02)[0]:
                self.output += os.read(self.master, 65536)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                break
            assert time.monotonic() < deadline, self.output[-2000:]
        while select.select([self.master], [], [], 0.05)[0]:
            self.output += os.read(self.master, 65536)
        code = os.waitstatus_to_exitcode(status)
        back = termios.tcgetattr(self._slave) == self._before
        os.close(self.master)
        os.close(self._slave)
        return Ended(code if code >= 0 else 128 - code, changed_modes(self.output), back, self.output)


def changed_modes(output: bytes) -> frozenset[int]:
    """Return the private modes whose final state differs from that of a new terminal."""
    state: dict[int, bool] = {}
    for numbers, what in _MODE.findall(output):
        for number in numbers.split(b";"):
            state[int(number)] = what == b"h"
    return frozenset(number for number, on in state.items() if on != (number in ON_AT_FIRST))


def children_of(pid: int) -> list[int]:
    """Return the child processes of a process on Linux."""
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    return [int(child) for child in listed]


def python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]
