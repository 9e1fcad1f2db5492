"""Processor time and memory of processes and of the machine. Most figures are available on Linux only."""

import os
import sys
from pathlib import Path


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process in seconds, in steps of 0.01; 0 if the system does not report it."""
    try:
        status = Path("/proc", str(pid), "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0.0
    user, system = status.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def machine_cpu_seconds() -> float:
    """Return the total processor time of all programs in seconds; 0 if the system does not report it."""
    try:
        total = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0]
    except OSError:
        return 0.0
    user, nice, system, _idle, _waiting, *interrupts = map(int, total.split()[1:9])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def peak_rss_mb(pid: int) -> float | None:
    """Return the peak memory of a process in units of 10^6 bytes; None if the system does not report it."""
    try:
        lines = Path("/proc", str(pid), "status").read_text(encoding="utf-8", errors="replace").splitlines()
        peak = next(line for line in lines if line.startswith("VmHWM:"))
        return int(peak.split()[1]) * 1024 / 1e6
    except (OSError, StopIteration):
        return _own_peak_rss_mb() if pid == os.getpid() else None


def _own_peak_rss_mb() -> float | None:
    if sys.platform == "win32":
        return None
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def processor_name() -> str:
    """Return the name of the processor; empty if the system does not report it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return ""
