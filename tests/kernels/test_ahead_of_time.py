"""All kernels compile for every supported card, within the limits for registers and shared memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import fetched_folder

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a module in a process without Triton's interpreter, with a persistent compilation cache."""
    removed = ("TRITON_INTERPRET", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if name not in removed}
    cache = {"TRITON_CACHE_DIR": str(fetched_folder() / "triton"), "TRITON_STORE_BINARY_ONLY": "1"}
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=ROOT, env={**environment, **cache}, capture_output=True, text=True, check=False)


@pytest.mark.share(1)
@pytest.mark.parametrize("part", ["1/4", "2/4", "3/4", "4/4"])
def test_kernels_compile_for_one_card_of_each_class(part: str) -> None:
    done = run("tests.kernels.ahead_of_time", "--combinations", part)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_kernels_compile_in_every_configuration() -> None:
    done = run("tests.kernels.ahead_of_time", "--full")
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


def test_numbers_of_tokens_with_one_tile_share_a_compiled_product() -> None:
    done = run("tests.kernels.variants")
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


def test_sums_of_8_bit_floats_are_added_outside_of_the_matrix_units() -> None:
    done = run("tests.kernels.float8_loops")
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


def test_loading_compiles_the_products_of_prompts() -> None:
    done = run("tests.kernels.recorded_prompts")
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.share(1)
@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "int4 g128", "MXFP4"])
def test_experts_of_long_prompts_are_faster_in_integers(kind: str) -> None:
    done = run("tests.kernels.expert_products", "--card", "4090", "--kind", kind)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


def test_loading_compiles_at_most_40_kernels() -> None:
    done = run("tests.kernels.loaded_kernels")
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


def test_faulty_kernels_are_reported() -> None:
    done = run("tests.kernels.faulty_kernels")
    assert done.returncode == 1, done.stderr
    faults = [line for line in done.stdout.splitlines() if line.startswith("FAULT")]
    assert len(faults) == 4, done.stdout
    assert "order: ['_first_kernel', '_second_kernel']" in done.stdout
    assert sum("_hasty_kernel" in line and "does not wait before: LDG" in line for line in faults) == 1
    assert sum("ROWS=256" in line and "spills registers" in line for line in faults) == 1
    assert sum("DEPTH=128" in line and "shared memory" in line for line in faults) == 1
    assert (
        sum("_changing_kernel" in line and "does not compile" in line and "Loop-carried" in line for line in faults)
        == 1
    )
