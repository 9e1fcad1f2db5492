"""Wait until a process has opened a model file, which it does before it loads the model."""

import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any


def wait_until_opened(process: "subprocess.Popen[Any]", file: Path) -> None:
    """Wait until `process` has opened `file`. Fails if the process ends first."""
    while file not in _open_files(process.pid):
        assert process.poll() is None, "the process ended before it opened the model"
        time.sleep(0.002)


def _open_files(number: int) -> list[Path]:
    found: list[Path] = []
    for link in Path(f"/proc/{number}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            found.append(link.readlink())
    return found
