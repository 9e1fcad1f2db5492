"""Run the kernel tests for a CPU tier that the processor supports but does not choose.

A process can have the kernels of only one tier, so the tests run in a separate pytest with `--cpu-tier`. Each run takes
one random case, because all kernels have to be compiled for it.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quant.cpu.tiers import available, choose

ROOT = Path(__file__).parents[4]
# Tests of every kind of kernel, and of the logits of a small model.
TESTS = (
    "tests/quant/cpu/test_activations.py",
    "tests/quant/cpu/test_matmul.py::test_every_bit_equals_the_integer_reference",
    "tests/quant/cpu/test_matmul.py::test_largest_super_block_sums_equal_the_integer_reference",
    "tests/engine/backends/cpu/test_operations.py",
    "tests/engine/backends/cpu/test_attention.py",
    "tests/engine/backends/cpu/test_token_draw.py",
    "tests/engine/backends/cpu/test_logprobs.py::test_tiny_models_are_close_to_float32",
)
# a few of the many cases in these files
SUBSET = "not (all_chunkings or every_bit or window_excludes or other_head_widths) or 4-64 or shape9 or shape11 or 33"


@pytest.mark.share(1)
@pytest.mark.parametrize("tier", [tier.name for tier in available() if tier.name != choose("auto").tier])
@pytest.mark.parametrize("tests", TESTS)
def test_kernel_tests_pass_on_other_cpu_tiers(tier: str, tests: str, cpu_kernels: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"--cpu-tier={tier}"]
    command.append("--every-case")  # SUBSET already reduces the number of cases
    done = subprocess.run(
        [*command, "-k", SUBSET, tests], cwd=ROOT, check=False, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
