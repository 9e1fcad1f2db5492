import subprocess
import sys
import threading
from pathlib import Path

import pytest

from app.process.uninterruptible import exit_if_busy, run_uninterruptible

ROOT = Path(__file__).parents[3]

# A program whose work would take 10 minutes, ignores interrupts, and is interrupted after 0.3 s.
PROGRAM = """
import _thread, sys, threading, time
from app.process.uninterruptible import exit_if_busy, run_uninterruptible
threading.Timer(0.3, _thread.interrupt_main).start()
print("begun")
try:
    run_uninterruptible(lambda: time.sleep(600))
except KeyboardInterrupt:
    print("interrupted")
    sys.exit(exit_if_busy(130))
"""


def test_work_runs_in_another_thread() -> None:
    assert run_uninterruptible(threading.get_ident) != threading.get_ident()


def test_exception_of_the_work_is_raised() -> None:
    def fail() -> None:
        raise LookupError("nothing there")

    with pytest.raises(LookupError, match="nothing there"):
        run_uninterruptible(fail)


def test_interrupt_does_not_wait_for_the_work() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "begun\ninterrupted\n", "")


def test_status_is_returned_if_no_work_runs() -> None:
    assert exit_if_busy(7) == 7
