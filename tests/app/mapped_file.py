"""Waiting until a process reads a model: from then on its file is mapped, until the model is loaded."""

import subprocess
import time
from pathlib import Path
from typing import Any


def wait_until_mapped(process: "subprocess.Popen[Any]", file: Path) -> None:
    """Returns when `process` has mapped `file`. Fails if it ends before."""
    maps = Path(f"/proc/{process.pid}/maps")
    while str(file) not in maps.read_text():
        assert process.poll() is None, "it ended before it read the model"
        time.sleep(0.002)
