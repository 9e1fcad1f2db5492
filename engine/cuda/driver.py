"""NVIDIA's driver on this machine, told by the system itself. Imports no torch, which may be built without CUDA."""

import re
from pathlib import Path

DRIVER = Path("/proc/driver/nvidia/version")
_VERSION = re.compile(r"\b(\d{3}\.\d+(?:\.\d+)?)\b")


def driver_version() -> str | None:
    """Such as 550.54.14; empty where it does not say; None where no driver is loaded."""
    try:
        found = _VERSION.search(DRIVER.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return found[1] if found else ""
