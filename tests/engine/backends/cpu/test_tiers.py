"""A tier that this processor can execute and does not take by itself: the tests of the kernels, run once more.

A process has the kernels of one tier, so that each gets a pytest of its own, in which the processor has no other
instructions (`--cpu-tier`). A run draws one of them, since it compiles all that they need.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quant.cpu.tiers import available, choose

ROOT = Path(__file__).parents[4]
# Every kind of kernel, and a small model's logits.
TESTS = (
    "tests/quant/cpu/test_activations.py",
    "tests/quant/cpu/test_matmul.py::test_every_bit_equals_the_integer_reference",
    "tests/quant/cpu/test_matmul.py::test_largest_super_block_sums_equal_the_integer_reference",
    "tests/engine/backends/cpu/test_operations.py",
    "tests/engine/backends/cpu/test_attention.py",
    "tests/engine/backends/cpu/test_drawing.py",
    "tests/engine/backends/cpu/test_logprobs.py::test_tiny_models_are_near_float32",
)
FEW = "not (a_prompt_is_cut or every_bit or a_window or other_widths) or 4-64 or shape9 or shape11 or 33"  # of many


@pytest.mark.share(1)
@pytest.mark.parametrize("tier", [tier.name for tier in available() if tier.name != choose("auto").tier])
@pytest.mark.parametrize("tests", TESTS)
def test_kernels_of_another_tier(tier: str, tests: str, cpu_kernels: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"--cpu-tier={tier}"]
    command.append("--every-case")  # of those that FEW leaves
    done = subprocess.run(
        [*command, "-k", FEW, tests], cwd=ROOT, check=False, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
