"""The NVIDIA driver: its version, the version that a CUDA release needs, and free memory. Imports no torch."""

import re
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path

MODULE = Path("/proc/driver/nvidia/version")  # of the kernel module on Linux
# In WSL 2 the driver runs on Windows, which puts its libraries here. There is no kernel module.
WSL_LIBRARY = Path("/usr/lib/wsl/lib/libcuda.so.1")
# Oldest Linux driver for each CUDA major version (CUDA release notes, "minor version compatibility").
LEAST_DRIVER: Mapping[int, int] = {11: 450, 12: 525, 13: 580}
TIMEOUT = 10  # seconds
_VERSION = re.compile(r"\b(\d{3}\.\d+(?:\.\d+)?)\b")


def driver_version() -> str | None:
    """Return the driver version, such as 550.54.14; "" if it is unknown; None if no driver is loaded."""
    try:
        text = MODULE.read_text(encoding="utf-8", errors="replace")
    except OSError:
        if not WSL_LIBRARY.exists():
            return None
        text = _reported("driver_version")
    found = _VERSION.search(text)
    return found[1] if found else ""


def too_old_for(cuda: str | None, version: str | None) -> int:
    """Return the oldest driver that a CUDA version needs, such as 580 for "13.0". 0 if `version` is not older."""
    major = (version or "").partition(".")[0]
    release = (cuda or "").partition(".")[0]
    least = LEAST_DRIVER.get(int(release), 0) if release.isdecimal() else 0
    return least if major.isdecimal() and int(major) < least else 0


def free_memories() -> dict[str, int]:
    """Return the free memory of each GPU in bytes, by its UUID without a prefix. Empty if the driver does not tell.

    torch could tell as well, but it would take some hundred megabytes on every GPU that it asks.
    """
    rows = [line.split(",") for line in _reported("uuid,memory.free").splitlines()]
    found = [(row[0].strip().removeprefix("GPU-"), row[1].strip()) for row in rows if len(row) == 2]
    return {uuid: int(mebibytes) << 20 for uuid, mebibytes in found if mebibytes.isdecimal()}


@cache
def _nvidia_smi() -> str:
    beside = WSL_LIBRARY.with_name("nvidia-smi")
    return str(beside) if beside.exists() else "nvidia-smi"


def _reported(query: str) -> str:
    """Return what nvidia-smi prints for a query, one line per GPU; empty if it fails."""
    command = [_nvidia_smi(), f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""
