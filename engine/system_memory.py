"""The memory of this machine and of this process, in bytes.

In a container, the limit of its control group (cgroup) can be lower than the memory of the machine.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

_PROCESS = Path("/proc/self")
_CGROUPS = Path("/sys/fs/cgroup")  # where Linux mounts control groups


@dataclass(frozen=True, slots=True)
class _Version:
    """The files of a memory controller, and the keys of its page cache in memory.stat.

    The kernel frees the page cache before a group exceeds its limit.
    """

    mount: str  # folder below the mount point of all versions
    limits: tuple[str, ...]
    usage: str
    page_cache: tuple[str, ...]


_V1 = _Version(
    "memory", ("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")
)
_V2 = _Version("", ("memory.max", "memory.high"), "memory.current", ("active_file", "inactive_file"))


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """The memory of a control group that has a limit."""

    limit: int
    used: int  # without the page cache

    @property
    def available(self) -> int:
        return max(0, self.limit - self.used)


def total_memory() -> int:
    """Return the memory of the machine, or the limit of this process's control group if that is lower."""
    return min([int(psutil.virtual_memory().total), *(group.limit for group in group_memories())])


def available_memory() -> int:
    """Return the number of bytes that this process can allocate without swapping.

    Unlike free memory, this includes the page cache.
    """
    return min([int(psutil.virtual_memory().available), *(group.available for group in group_memories())])


def resident_bytes() -> int | None:
    """Return the resident bytes of this process that are not mapped from files; None if the system reports none."""
    try:
        status = (_PROCESS / "status").read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return None
    found = (line.split()[1] for line in status.splitlines() if line.startswith("RssAnon:"))
    kibibytes = next(found, "")
    return int(kibibytes) << 10 if kibibytes.isdecimal() else None


def group_memories(process: Path = _PROCESS, cgroups: Path = _CGROUPS) -> Iterator[GroupMemory]:
    """Yield the memory of each control group with a limit that holds this process. A group also limits those in it."""
    with suppress(OSError, ValueError):
        for line in (process / "cgroup").read_text(encoding="utf-8").splitlines():
            number, controllers, path = line.split(":", 2)
            version = _V2 if number == "0" else _V1
            if version is _V2 or "memory" in controllers.split(","):
                # In a container, the path can be that on the host, whose folders are not mounted. The container's own
                # group is then at the mount point.
                own = cgroups / version.mount / path.lstrip("/")
                folders = (folder for folder in (own, *own.parents) if folder.is_relative_to(cgroups))
                yield from filter(None, (_read(folder, version) for folder in folders))


def _read(folder: Path, version: _Version) -> GroupMemory | None:
    """Return the memory of the control group in a folder; None if it has no limit."""
    limits = [limit for name in version.limits if (limit := _number(folder / name)) is not None]
    used = _number(folder / version.usage)
    if not limits or used is None:
        return None
    cached = 0
    with suppress(OSError, ValueError):
        rows = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
        cached = sum(int(rows.get(key, 0)) for key in version.page_cache)
    return GroupMemory(min(limits), max(0, used - cached))


def _number(path: Path) -> int | None:
    """Return the number in a file; None if there is none, as in memory.max without a limit."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
