"""Tests for the guard: it restores the terminal and returns the right status, however the child ends."""

import os
import signal

import pytest

from tests.support.processes import until
from tests.support.terminal_screen import Terminal, children_of, python

# sets the modes that the screens set: alternate screen, mouse reports, and no echo
PROGRAM = """
import os, signal, sys, termios, time, tty
from app.chat_backend.guard import run_guarded

def work(left):
    before = termios.tcgetattr(0)
    tty.setraw(0)
    os.write(1, b"\\x1b[?1049h\\x1b[?1000h\\x1b[?1003h\\x1b[?1006h\\x1b[?2004h\\x1b[?25lready")
    how = sys.argv[1]
    if how == "return":
        os.write(1, b"\\x1b[?1000l\\x1b[?1003l\\x1b[?1006l\\x1b[?2004l\\x1b[?1049l\\x1b[?25h")
        termios.tcsetattr(0, termios.TCSANOW, before)
        left()
        return 7
    if how == "raise":
        raise RuntimeError("broken")
    if how == "exit":
        os._exit(3)
    while how == "wait":
        time.sleep(0.1)  # a signal right before a longer sleep would be handled after it
    os.kill(os.getpid(), getattr(signal, how))
    time.sleep(1000)

sys.exit(run_guarded(work))
"""


def run(how: str) -> Terminal:
    terminal = Terminal(python("-c", PROGRAM, how), {})
    terminal.read_until(lambda output: b"ready" in output)
    return terminal


@pytest.mark.parametrize(
    ("how", "status"),
    [("return", 7), ("raise", 1), ("exit", 3)]
    + [(name, 128 + getattr(signal, name)) for name in ("SIGSEGV", "SIGKILL", "SIGHUP")],
)
def test_terminal_is_restored_however_the_child_ends(how: str, status: int) -> None:
    ended = run(how).ended()
    assert (ended.status, ended.modes, ended.attributes_are_back) == (status, frozenset(), True)
    assert (b"messages and replies are saved" in ended.output) == (how in ("SIGSEGV", "SIGKILL"))


def test_terminating_the_guard_ends_its_child() -> None:
    terminal = run("wait")
    [child] = children_of(terminal.pid)
    os.kill(terminal.pid, signal.SIGTERM)
    ended = terminal.ended()
    assert (ended.status, ended.modes, ended.attributes_are_back) == (128 + signal.SIGTERM, frozenset(), True)
    assert not os.path.exists(f"/proc/{child}")


def test_killing_the_guard_ends_its_child() -> None:
    terminal = run("wait")
    os.kill(terminal.pid, signal.SIGKILL)
    terminal.read_until(lambda output: b"\x1b[?1049l" in output)
    assert terminal.ended().modes == frozenset()


def test_killing_a_guard_below_a_shell_ends_its_child() -> None:
    """The shell keeps the terminal open, so that no hangup of the terminal ends the child."""
    terminal = Terminal(["/bin/sh", "-c", '"$@"; read line', "sh", *python("-c", PROGRAM, "wait")], {})
    terminal.read_until(lambda output: b"ready" in output)
    [guard] = children_of(terminal.pid)
    [child] = children_of(guard)
    os.kill(guard, signal.SIGKILL)
    terminal.read_until(lambda output: b"\x1b[?1049l" in output)
    until(lambda: not os.path.exists(f"/proc/{child}"))
    terminal.type("\n")
    ended = terminal.ended()
    assert (ended.modes, ended.attributes_are_back) == (frozenset(), True)
