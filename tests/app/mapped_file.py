"""Wait until a process has mapped a model file, which it does before it loads the model."""

import subprocess
import time
from pathlib import Path
from typing import Any


def wait_until_mapped(process: "subprocess.Popen[Any]", file: Path) -> None:
    """Wait until `process` has mapped `file`. Fails if the process ends first."""
    maps = Path(f"/proc/{process.pid}/maps")
    while str(file) not in maps.read_text():
        assert process.poll() is None, "the process ended before it mapped the model"
        time.sleep(0.002)
