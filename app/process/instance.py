"""The record by which other commands find a running server, and how one is asked to stop.

A server holds a lock beside its record for as long as it lives, and the system takes the lock from it however it ends:
a record without a lock is stale, whoever has its process id by now, and is removed by whoever looks. The records lie in
a folder of this user alone. Knows nothing of HTTP.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from app.errors import AppError
from app.settings.settings import Settings
from app.whole_file import write_whole
from engine.private_folder import private_folder

if TYPE_CHECKING:
    from filelock import FileLock


_SUCCESSION_SECONDS = 5.0  # a server on its way out may still hold the lock of a port that it has left already
_STOP_SECONDS = 10.0
_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Instance:
    """A running server."""

    pid: int
    port: int
    url: str  # without a path: "http://127.0.0.1:4645"
    model: str  # the catalog's name, or the path as it was given
    model_path: str  # absolute
    started_at: str  # ISO 8601 in UTC

    @property
    def api_url(self) -> str:
        """What OpenAI clients call the base URL."""
        return f"{self.url}/v1"


@contextmanager
def recorded(instance: Instance, settings: Settings) -> Iterator[None]:
    """Let others find this process while the body runs."""
    record = _record(settings, instance.port)
    private_folder(record.parent).chmod(0o700)  # fails if it is someone else's
    lock = _lock(record)
    lock.acquire(timeout=_SUCCESSION_SECONDS)
    try:
        write_whole(record, json.dumps(asdict(instance), indent=2).encode(), 0o600)
        yield
    finally:
        withdraw(instance, settings)
        lock.release()


def withdraw(instance: Instance, settings: Settings) -> None:
    """Remove the record of this process. Only the holder of its lock may; harmless when it is gone already."""
    _remove(_record(settings, instance.port))


def running_instances(settings: Settings) -> list[Instance]:
    """The servers of this user, by port. Stale records are removed on the way."""
    records = sorted(_folder(settings).glob("*.json"))
    found = (_read(record) for record in records if not _removed_as_stale(record))
    return sorted((instance for instance in found if instance), key=lambda instance: instance.port)


def stop_instance(instance: Instance, settings: Settings) -> None:
    """Ask a server to stop, and wait until it is gone. Raises AppError when it does not go."""
    record = _record(settings, instance.port)
    if _removed_as_stale(record):
        return
    with suppress(ProcessLookupError):
        os.kill(instance.pid, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_SECONDS
    while _stands_behind(instance, record) or _exists(instance.pid):
        if time.monotonic() > deadline:
            raise AppError(
                f"the server on port {instance.port} (pid {instance.pid}) does not stop", f"kill -9 {instance.pid}"
            )
        time.sleep(_POLL_SECONDS)


def _folder(settings: Settings) -> Path:
    return settings.state_dir / "servers"


def _record(settings: Settings, port: int) -> Path:
    return _folder(settings) / f"{port}.json"


def _lock(record: Path) -> "FileLock":
    from filelock import FileLock

    return FileLock(record.with_suffix(".lock"), mode=0o600)


def _removed_as_stale(record: Path) -> bool:
    """Whether no server stands behind the record; what was left of it is removed then."""
    if not record.parent.exists():
        return True
    from filelock import Timeout

    lock = _lock(record)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return False
    try:
        _remove(record)
    finally:
        lock.release()
    return True


def _stands_behind(instance: Instance, record: Path) -> bool:
    return not _removed_as_stale(record) and _read(record) == instance


def _remove(record: Path) -> None:
    record.unlink(missing_ok=True)
    with suppress(PermissionError):  # Windows keeps an open file; it is empty, and the next server takes it
        record.with_suffix(".lock").unlink(missing_ok=True)


def _read(record: Path) -> Instance | None:
    """The content of a record; None when it is gone, or was written by another version."""
    try:
        content = json.loads(record.read_bytes())
        return Instance(**{**content, "pid": int(content["pid"]), "port": int(content["port"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _exists(pid: int) -> bool:
    """Whether the process is there still, for the moment that it needs to end after it gave its lock back."""
    if sys.platform == "win32":  # where a signal is no question
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return not _is_zombie(pid)


def _is_zombie(pid: int) -> bool:
    """Whether the process has ended, and only its parent has not asked for its status yet. Linux tells."""
    try:
        status = Path("/proc", str(pid), "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] == "Z"
