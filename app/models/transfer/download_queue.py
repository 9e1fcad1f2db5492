"""Notes about downloads on this machine, for display: each process writes which models it downloads or waits for.

Nothing depends on the notes; download_turn.py decides the order. The note of a process that has ended is removed.
"""

import enum
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from app.models.hub_models import HubModels
from app.models.transfer.download_turn import running_download
from engine.private_folder import private_folder

_FOLDER = ".downloads/waiting"


class DownloadState(enum.StrEnum):
    RUNNING = "running"
    WAITING = "waiting"  # waits for other downloads
    STOPPED = "stopped"  # a part has arrived, and no process downloads the rest


@dataclass(frozen=True, slots=True)
class Download:
    """A model that is not complete yet."""

    name: str
    state: DownloadState
    done: int  # bytes that have arrived
    total: int | None  # None: unknown


class QueueNote:
    """The note of a process or command: the models that it still has to download, in order."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        self._path = path
        self._names = list(names)
        self._write()

    def add(self, name: str) -> None:
        self._names.append(name)
        self._write()

    def done(self, name: str) -> None:
        """Remove a model from this process's note when its download has ended, whether or not it succeeded."""
        with suppress(ValueError):
            self._names.remove(name)
        self._write()

    def _write(self) -> None:
        """Write the note. It need not survive a power cut."""
        partial = self._path.with_suffix(".partial")
        with suppress(OSError):
            partial.write_text(json.dumps({"names": self._names}))
            os.replace(partial, self._path)


@contextmanager
def queue_note(models_dir: Path, names: Sequence[str] = ()) -> Iterator[QueueNote]:
    """Publish a note while the body runs. If the folder is read-only, the download runs without a note."""
    from filelock import FileLock

    path = models_dir / _FOLDER / f"{time.time_ns():020d}-{os.getpid()}.json"
    lock = FileLock(path.with_suffix(".lock"))
    with suppress(OSError):
        private_folder(path.parent)
        lock.acquire()
    try:
        yield QueueNote(path, names)
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)
            lock.release()
            path.with_suffix(".lock").unlink(missing_ok=True)


def downloads(models: HubModels, models_dir: Path) -> list[Download]:
    """Return the running download, the waiting ones in the order of their requests, and the unfinished ones."""
    unfinished, running = [*models.unfinished()], running_download(models_dir)
    found = [Download(running.name, DownloadState.RUNNING, running.done, running.total)] if running else []
    for name in _queued(models_dir):
        if not any(is_same_model(name, fetch.name) for fetch in found):
            there = sum(one.arrived for one in unfinished if is_same_model(one.name, name))
            found.append(Download(name, DownloadState.WAITING, there, None))
    left = [one for one in unfinished if not any(is_same_model(one.name, fetch.name) for fetch in found)]
    return [*found, *(Download(one.name, DownloadState.STOPPED, one.arrived, one.size) for one in left)]


def is_same_model(name: str, asked: str) -> bool:
    """Whether `name` is the requested name. `name` gets a quantization as soon as one is chosen."""
    return name == asked or name.startswith(f"{asked}:")


def _queued(models_dir: Path) -> list[str]:
    """Return the names in all notes. The process that started first comes first."""
    return [name for note in sorted((models_dir / _FOLDER).glob("*.json")) for name in _read(note)]


def _read(note: Path) -> list[str]:
    from filelock import FileLock, Timeout

    lock = note.with_suffix(".lock")
    try:
        with FileLock(lock).acquire(timeout=0):
            note.unlink(missing_ok=True)
        lock.unlink(missing_ok=True)
        return []
    except Timeout:
        with suppress(OSError, ValueError, KeyError, TypeError):
            return [str(name) for name in json.loads(note.read_bytes())["names"]]
    return []
