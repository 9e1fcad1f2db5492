"""Whatever kernels can be launched on any card compiles for it, within its registers and its shared memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import fetched_folder

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """In a process in which Triton compiles, and keeps what it has compiled before."""
    left_out = ("TRITON_INTERPRET", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    kept = {"TRITON_CACHE_DIR": str(fetched_folder() / "triton"), "TRITON_STORE_BINARY_ONLY": "1"}
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=ROOT, env={**environment, **kept}, capture_output=True, text=True, check=False)


def test_one_card_of_each_class() -> None:
    done = run("tests.kernels.ahead_of_time")
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_every_configuration() -> None:
    done = run("tests.kernels.ahead_of_time", "--full")
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_is_planted_is_found() -> None:
    done = run("tests.kernels.planted")
    assert done.returncode == 1, done.stderr
    faults = [line for line in done.stdout.splitlines() if line.startswith("FAULT")]
    assert len(faults) == 3, done.stdout
    assert sum("ROWS=256" in line and "spills registers" in line for line in faults) == 1
    assert sum("DEPTH=128" in line and "shared memory" in line for line in faults) == 1
    assert (
        sum("_changing_kernel" in line and "does not compile" in line and "Loop-carried" in line for line in faults)
        == 1
    )
