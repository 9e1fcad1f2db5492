"""Signals end a process cleanly. The tests send them to child processes."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import HANGING_SECONDS

ROOT = Path(__file__).parents[3]

# A program that sends itself signals: the first interrupts it, and the others arrive during its cleanup.
PROGRAM = """
import os, signal, sys
from app.process.signals import interrupt_on_signals
for name in sys.argv[1].split():
    signal.signal(getattr(signal, name), signal.SIG_IGN)
interrupt_on_signals()
try:
    for name in sys.argv[2].split():
        os.kill(os.getpid(), getattr(signal, name))
    print("not interrupted")
except KeyboardInterrupt:
    for name in sys.argv[2].split():
        os.kill(os.getpid(), getattr(signal, name))
    print("ended in order")
"""


@pytest.mark.parametrize(
    ("ignored", "sent", "said"),
    [
        ("", "SIGTERM", "ended in order"),
        ("", "SIGHUP", "ended in order"),
        ("", "SIGHUP SIGTERM", "ended in order"),
        ("SIGHUP", "SIGHUP", "not interrupted"),  # nohup ignores SIGHUP in the same way
        ("SIGHUP", "SIGHUP SIGTERM", "ended in order"),
    ],
)
def test_first_signal_interrupts_and_later_ones_are_ignored(ignored: str, sent: str, said: str) -> None:
    command = [sys.executable, "-c", PROGRAM, ignored, sent]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=HANGING_SECONDS)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, said, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_interrupts_the_command_line(number: signal.Signals) -> None:
    code = f"""
import os, sys
from app import cli
cli.ingle.main = lambda **options: os.kill(os.getpid(), {int(number)})
sys.exit(cli.main())
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=HANGING_SECONDS)
    assert done.returncode == 130
