"""The log file of the servers of this user: one JSON object per line, in two files of limited size.

All servers append to the same file, each line in one write. A full file replaces the previous one. Lines have times,
counts, and errors, and no text of conversations.
"""

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from engine.private_folder import private_folder

MAX_BYTES = 4 << 20  # size of a full file
_LOUD = ("app",)  # loggers whose lines of level INFO are written; of all others, warnings and errors are


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of the log."""

    time: str  # ISO 8601 in UTC
    level: str
    port: int  # port of the server
    pid: int
    message: str  # may have several lines, such as those of a traceback


def log_path(state_dir: Path) -> Path:
    """Return the path of the current log file."""
    return state_dir / "server.log"


def previous_path(path: Path) -> Path:
    """Return the path of the log file that was full before."""
    return path.with_name(f"{path.name}.1")


class LogFile(logging.Handler):
    """Appends to the log file, and replaces it when it is full. Errors of the file system are ignored."""

    def __init__(self, state_dir: Path, port: int) -> None:
        super().__init__()
        self._path = log_path(private_folder(state_dir))
        self.port = port

    def emit(self, record: logging.LogRecord) -> None:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = LogLine(time, record.levelname.lower(), self.port, os.getpid(), self.format(record))
        content = json.dumps({name: getattr(line, name) for name in LogLine.__slots__}).encode() + b"\n"
        with suppress(OSError):
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(file, content)
                is_full = os.fstat(file).st_size >= MAX_BYTES
            finally:
                os.close(file)
            if is_full:
                self._rotate()

    def _rotate(self) -> None:
        from filelock import FileLock, Timeout

        with suppress(Timeout), FileLock(self._path.with_suffix(".lock"), timeout=0, mode=0o600):
            if self._path.stat().st_size >= MAX_BYTES:  # no other server has replaced it
                os.replace(self._path, previous_path(self._path))


@contextmanager
def logged_to(file: LogFile) -> Iterator[None]:
    """Write what this process logs to the file, and warnings to stderr, while the body runs."""
    root, levels = logging.getLogger(), {name: logging.getLogger(name).level for name in _LOUD}
    handlers = [file, *([logging.lastResort] if logging.lastResort and not root.handlers else [])]
    for handler in handlers:  # without any other handler, Python uses the last resort
        root.addHandler(handler)
    for name in _LOUD:
        logging.getLogger(name).setLevel(logging.INFO)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        for handler in handlers:
            root.removeHandler(handler)


class LogReader:
    """Reads the current log file from its start, and then the lines that servers add, also after it was replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._partial = b""

    def read(self) -> list[LogLine]:
        """Return the lines that were added since the last call."""
        content = b""
        if self._file is not None:
            is_replaced = self._is_replaced()  # before the rest is read, so that no line is missed
            content = self._file.read()
            if not is_replaced:
                return self._lines(content)
            self.close()
        with suppress(FileNotFoundError):
            self._file = self._path.open("rb")
            content += self._file.read()
        return self._lines(content)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _is_replaced(self) -> bool:
        if self._file is None:
            return True
        own = os.fstat(self._file.fileno())
        try:
            current = self._path.stat()
        except FileNotFoundError:  # it was replaced, and no line has been written since
            return True
        return not os.path.samestat(own, current) or current.st_size < self._file.tell()

    def _lines(self, content: bytes) -> list[LogLine]:
        *whole, self._partial = (self._partial + content).split(b"\n")
        return [line for line in map(parse_line, whole) if line is not None]


def parse_line(content: bytes) -> LogLine | None:
    """Return a line of the log; None if it is damaged or of another version."""
    try:
        return LogLine(**json.loads(content))
    except (ValueError, TypeError):
        return None
