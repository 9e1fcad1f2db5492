"""Records of running servers, by which other commands find and stop them.

A server holds a lock beside its record while it runs. The system releases the lock when the process ends or crashes. A
record without a lock is stale, even if another process now has the same process id, and every reader removes it. The
records are in a private folder of the user.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from app.errors import AppError
from app.settings.boxes import Box
from app.settings.settings import Settings
from app.whole_file import write_whole
from engine.private_folder import private_folder

if TYPE_CHECKING:
    from filelock import FileLock


_LOCK_SECONDS = 5.0  # longest wait for the lock of an ending server that no longer listens on the port
_STOP_SECONDS = 10.0
_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Instance:
    """A running server."""

    pid: int
    port: int
    url: str  # URL without a path, such as "http://127.0.0.1:4645"
    model: str  # name in the catalog, or the path as the user gave it
    model_path: str  # absolute path
    started_at: str  # ISO 8601 in UTC
    kind: Literal["server", "chat"] = "server"  # chat: the engine of chats, which exits when none uses it
    context_length: int | None = None  # in tokens; None: unknown, or the model returns embeddings
    serves_all: bool = False  # whether it loads all stored models; servers of earlier versions serve only `model`

    @property
    def title(self) -> str:
        """The name of the model for display. For a path, its last part without the suffix of a GGUF file."""
        path = Path(self.model_path)
        return path.name.removesuffix(".gguf") if Path(self.model).name == path.name else self.model

    @property
    def api_url(self) -> str:
        """The base URL for OpenAI clients."""
        return f"{self.url}/v1"


@dataclass(frozen=True)
class BoxInstance(Instance):
    """The server of a box, the user's other machine. It has no record, and may be away."""

    box: Box = field(kw_only=True)

    @classmethod
    def of(cls, box: Box, model: str = "") -> "BoxInstance":
        """Return the server of a box. `model`: the name by which requests to it name a model."""
        port = int(box.url.rpartition(":")[2])
        return cls(0, port, box.url, model, model, "", serves_all=True, box=box)


@contextmanager
def recorded(instance: Instance, settings: Settings) -> Iterator[None]:
    """Write the record of this process, and remove it after the body."""
    record = _record(settings, instance.port)
    private_folder(record.parent).chmod(0o700)  # fails if another user owns it
    lock = _lock(record)
    lock.acquire(timeout=_LOCK_SECONDS)
    try:
        write_whole(record, json.dumps(asdict(instance), indent=2).encode(), 0o600)
        yield
    finally:
        withdraw(instance, settings)
        lock.release()


def withdraw(instance: Instance, settings: Settings) -> None:
    """Remove the record of this process, if it still exists. Only the holder of its lock may call this."""
    _remove(_record(settings, instance.port))


def running_instances(settings: Settings) -> list[Instance]:
    """Return the servers of this user, sorted by port. Removes stale records."""
    records = sorted(_folder(settings).glob("*.json"))
    found = (_read(record) for record in records if not _remove_if_stale(record))
    return sorted((instance for instance in found if instance), key=lambda instance: instance.port)


def stop_instance(instance: Instance, settings: Settings) -> None:
    """Ask a server to stop, and wait until its process has ended. Raises AppError if that takes more than 10 s."""
    record = _record(settings, instance.port)
    if _remove_if_stale(record):
        return
    with suppress(ProcessLookupError):
        os.kill(instance.pid, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_SECONDS
    while _is_alive(instance, record) or _exists(instance.pid):
        if time.monotonic() > deadline:
            raise AppError(
                f"the server on port {instance.port} (pid {instance.pid}) did not stop within {_STOP_SECONDS:.0f} s",
                f"kill -9 {instance.pid}",
            )
        time.sleep(_POLL_SECONDS)


def _folder(settings: Settings) -> Path:
    return settings.state_dir / "servers"


def _record(settings: Settings, port: int) -> Path:
    return _folder(settings) / f"{port}.json"


def _lock(record: Path) -> "FileLock":
    from filelock import FileLock

    return FileLock(record.with_suffix(".lock"), mode=0o600)


def _remove_if_stale(record: Path) -> bool:
    """Remove the record if it is stale. Returns whether it is gone."""
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


def _is_alive(instance: Instance, record: Path) -> bool:
    return not _remove_if_stale(record) and _read(record) == instance


def _remove(record: Path) -> None:
    record.unlink(missing_ok=True)
    # Windows cannot delete an open file; it is empty, and the next server uses it again
    with suppress(PermissionError):
        record.with_suffix(".lock").unlink(missing_ok=True)


def _read(record: Path) -> Instance | None:
    """Return the content of a record; None if it is gone, or was written by another version."""
    try:
        content = json.loads(record.read_bytes())
        return Instance(**{**content, "pid": int(content["pid"]), "port": int(content["port"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _exists(pid: int) -> bool:
    """Whether the process still runs. It ends a moment after it has released its lock."""
    if sys.platform == "win32":  # on Windows, os.kill would end the process
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return not _is_zombie(pid)


def _is_zombie(pid: int) -> bool:
    """Whether the process has ended, and its parent has not read its status yet. False if the system is not Linux."""
    try:
        status = Path("/proc", str(pid), "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] == "Z"
