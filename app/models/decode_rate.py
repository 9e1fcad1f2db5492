"""The decode rate of this machine: weight bytes per second. It predicts the speed of other models.

The engine measures the rate. The server stores it in the state folder when it stops, so that it is known at the next
start.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from app.whole_file import write_whole
from engine.private_folder import private_folder

_FILE = "decode-rate.json"
_LARGE = 1_000_000_000  # bytes of weights from which memory reads dominate the time of a decode step
_FLUENT = 5.0  # tokens per second at which replies appear about as fast as users read
# Rates by device, for machines that have not measured one: half of the memory bandwidth of a slow desktop. With a GPU,
# each model that fits is fast.
_UNMEASURED: Mapping[str, float] = {"cpu": 15e9}


class DecodeRate(Struct, frozen=True):
    """The rate at which decode steps of one request read weights on a device."""

    device: str  # name of the backend
    bytes_per_second: float


def decode_rate(weight_bytes: int, step_seconds: float) -> float:
    """Return the weight bytes per second of steps with one token; 0 if it is unknown.

    `weight_bytes`: size of the weights that compute one token; 0: unknown. The rate is unknown if `step_seconds` is 0
    (not measured). It is also unknown for small weights: their steps spend most of the time outside of memory reads, so
    that the rate would make large models look slow.
    """
    return weight_bytes / step_seconds if step_seconds and weight_bytes >= _LARGE else 0.0


def expected_speed(bytes_per_second: float, weight_bytes: int | None) -> float | None:
    """Return the expected decode speed of a model in tokens per second; None if it is unknown.

    The step for a token reads a weight once and computes little with it, so its time is limited by the memory
    bandwidth: tokens/s = (bytes/s) / (bytes/token). `bytes_per_second` is the measured rate of another model on this
    machine; 0: not measured. `weight_bytes` is the size of the weights that compute one token; None: unknown. The KV
    cache is ignored, so a long context is slower.
    """
    return bytes_per_second / weight_bytes if bytes_per_second and weight_bytes else None


def is_fluent(speed: float | None) -> bool:
    """Whether replies at this speed, in tokens per second, appear as fast as users read. None: unknown, and allowed."""
    return speed is None or speed >= _FLUENT


def likely_rate(device: str, measured: float) -> float:
    """Return the measured rate of a device. If it is 0, return that of a slow machine, or 0 for a GPU."""
    return measured or _UNMEASURED.get(device, 0.0)


def remember_rate(folder: Path, rate: DecodeRate) -> None:
    """Store a rate in the state folder. A rate of 0 does not replace an earlier one."""
    if rate.bytes_per_second:
        with suppress(OSError):  # the rate is only a convenience
            write_whole(private_folder(folder) / _FILE, msgspec.json.encode(rate), 0o600)


def measured_rate(folder: Path, device: str) -> float:
    """Return the stored rate of a device; 0 if there is none."""
    found = remembered_rate(folder)
    return found.bytes_per_second if found is not None and found.device == device else 0.0


def remembered_rate(folder: Path) -> DecodeRate | None:
    """Return the stored rate, or None if there is no valid one."""
    with suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode((folder / _FILE).read_bytes(), type=DecodeRate)
    return None
