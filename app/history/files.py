"""Checks of a history's files before SQLite opens them.

SQLite would block on a pipe, and would silently drop a damaged log.
"""

import stat
import struct
from pathlib import Path
from typing import TypeAlias

from app.history.records import HistoryUnavailable
from app.history.schema import PAGE_SIZE
from app.history.wal import read_wal

Stamp: TypeAlias = tuple[tuple[int, int], ...]

_MAGIC = b"SQLite format 3\0"
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def wal_path(path: Path) -> Path:
    return Path(f"{path}-wal")


def shm_path(path: Path) -> Path:
    return Path(f"{path}-shm")


def stamp_of(path: Path) -> Stamp:
    """Return write times and sizes of the file and its log, which change when another process writes."""
    found = [file.stat() for file in (path, wal_path(path)) if file.exists()]
    return tuple((status.st_mtime_ns, status.st_size) for status in found)


def require_files(path: Path) -> None:
    """Check that the history's files are regular files. Raises HistoryUnavailable if one is not, or OSError."""
    for file in (path, wal_path(path), shm_path(path), path.with_suffix(".lock")):
        kind = stat.S_IFMT(file.stat().st_mode) if file.exists() else stat.S_IFREG
        if kind != stat.S_IFREG:
            what = _KINDS.get(kind, "no file")
            raise HistoryUnavailable(f"{file} is {what}", "Move it away, then start ingle again.")


def is_empty(path: Path) -> bool:
    """Whether the file exists and is empty, without a log."""
    return path.exists() and not path.stat().st_size and not read_start(wal_path(path))


def find_damage(path: Path) -> str:
    """Return why the file's header or the log is damaged, or "". No process may have these files open.

    Raises OSError.
    """
    header = read_start(path, 100)
    log = read_wal(read_start(wal_path(path)), read_start(shm_path(path)))
    if log.is_damaged:
        return log.damage
    if log.frames and not header:
        return "its file is empty, and its log of recent changes is not"
    return "" if not header or _is_header(header) else "the header of its file is damaged"


def read_start(path: Path, most: int = -1) -> bytes:
    """Return at most the first `most` bytes of a file; empty if the file does not exist. Raises OSError."""
    try:
        with open(path, "rb") as file:
            return file.read(most)
    except FileNotFoundError:
        return b""


def _is_header(header: bytes) -> bool:
    """Whether this is a header that SQLite writes with this program's settings."""
    if len(header) < 100 or not header.startswith(_MAGIC):
        return False
    page_size, *versions = struct.unpack_from(">H2B", header, 16)
    encoding = int.from_bytes(header[56:60], "big")
    is_format = page_size == PAGE_SIZE and header[20:24] == bytes((0, 64, 32, 32)) and encoding <= 1
    return is_format and versions in ([1, 1], [2, 2])
