"""Freed memory is returned to the system."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import HANGING_SECONDS

ROOT = Path(__file__).parents[2]
GROWTH = """
import numpy as np
from engine.freed_memory import share_pools
from engine.system_memory import resident_bytes

share_pools()
first = np.ones(24 << 20, np.uint8)
del first
before, large, small = resident_bytes(), [], []
for _ in range(10):
    large.append(np.ones(16 << 20, np.uint8))
    small.append([bytes(2000) for _ in range(100)])
large.clear()
print(resident_bytes() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator of glibc is tested")
def test_large_blocks_are_returned_although_small_ones_between_them_are_in_use() -> None:
    """A separate process is measured, because other tests leave memory that is used again."""
    done = subprocess.run(
        [sys.executable, "-c", GROWTH], cwd=ROOT, capture_output=True, check=True, timeout=HANGING_SECONDS
    )
    assert int(done.stdout) < 16 << 20
