"""One download at a time on this machine, with progress that other processes can show.

The downloading process holds a lock, which the system releases when the process ends or crashes. It writes its
progress to a small file beside the lock. A process that waits for the lock shows that progress as if it were its own.
Another file requests a download to stop.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from app.errors import DownloadStopped
from app.progress import Progress, Report, Unit
from engine.private_folder import private_folder

if TYPE_CHECKING:
    from filelock import FileLock

_FOLDER, _LOCK, _STATE, _STOP = ".downloads", "turn.lock", "now.json", "stop.json"
_RESUME = "The part that has arrived is kept. Pull the model again to resume."
_POLL_SECONDS = 0.25  # seconds between two checks, and between two writes of the progress


@dataclass(frozen=True, slots=True)
class Running:
    """The progress of a running download."""

    pid: int
    name: str  # name of the model
    label: str  # description of the current step
    done: int  # bytes done so far
    total: int | None


class DownloadTurn:
    """The turn of one model, in the models folder."""

    def __init__(self, models_dir: Path, name: str) -> None:
        self._folder = models_dir / _FOLDER
        self._name = name
        self._since = time.time()

    @contextmanager
    def hold(self, progress: Progress) -> Iterator[Progress]:
        """Wait until no other process downloads, then hold the turn while the body runs. Yields the progress to report
        to.

        Raises DownloadStopped, also from reports of the body, if a process requests the download to stop.
        """
        from filelock import FileLock, Timeout

        lock = FileLock(private_folder(self._folder) / _LOCK)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            self._watch(lock, progress)
        try:
            (self._folder / _STATE).unlink(missing_ok=True)  # left by a process that was killed
            self._check_stop()  # a stop may have been requested before the first report
            yield _SharedProgress(progress, self._publish, self._check_stop)
        finally:
            (self._folder / _STATE).unlink(missing_ok=True)
            lock.release()

    def _watch(self, lock: "FileLock", progress: Progress) -> None:
        """Show the progress of another download until its lock is free."""
        from filelock import Timeout

        shown: tuple[str, int | None] | None = None
        with ExitStack() as display:
            report: Report = _ignore
            while True:
                running = _read(self._folder)
                if running and (running.label, running.total) != shown:
                    display.close()
                    if shown is None:
                        progress.say(self._describe(running))
                    shown = running.label, running.total
                    report = display.enter_context(progress.task(running.label, running.total))
                if running:
                    report(running.done)
                self._check_stop()
                with suppress(Timeout):
                    lock.acquire(timeout=_POLL_SECONDS, poll_interval=_POLL_SECONDS / 2)
                    return

    def _describe(self, running: Running) -> str:
        if running.name == self._name:
            return f"Another ingle process (pid {running.pid}) is already downloading {running.name}."
        return f"{self._name} is next. Another ingle process (pid {running.pid}) is downloading {running.name}."

    def _publish(self, label: str, total: int | None, done: int) -> None:
        """Write the progress file. Nothing depends on it, so it need not survive a power cut."""
        partial = self._folder / f"{_STATE}.{os.getpid()}"
        with suppress(OSError):
            partial.write_text(json.dumps(asdict(Running(os.getpid(), self._name, label, done, total))))
            os.replace(partial, self._folder / _STATE)

    def _check_stop(self) -> None:
        with suppress(OSError, ValueError, KeyError, TypeError):
            request = json.loads((self._folder / _STOP).read_bytes())
            if request["name"] == self._name and float(request["at"]) >= self._since:
                raise DownloadStopped(f"the download of {self._name} was stopped", _RESUME)


def running_download(models_dir: Path) -> Running | None:
    """Return the running download of any process."""
    from filelock import FileLock, Timeout

    folder = models_dir / _FOLDER
    if not (folder / _STATE).exists():
        return None
    try:
        with FileLock(folder / _LOCK).acquire(timeout=0):
            return None  # the process was killed
    except Timeout:
        return _read(folder)


def ask_to_stop(models_dir: Path, name: str) -> None:
    """Request that the download of a model stops, even if it still waits for its turn. Raises OSError."""
    folder = private_folder(models_dir / _FOLDER)
    partial = folder / f"{_STOP}.{os.getpid()}"
    partial.write_text(json.dumps({"name": name, "at": time.time()}))
    os.replace(partial, folder / _STOP)


def _read(folder: Path) -> Running | None:
    try:
        content = json.loads((folder / _STATE).read_bytes())
        total = content["total"]
        label, name = str(content["label"]), str(content["name"])
        return Running(int(content["pid"]), name, label, int(content["done"]), None if total is None else int(total))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _ignore(done: int) -> None:
    """Ignore reports until there is a display."""


class _SharedProgress:
    """Progress that other processes can follow. At each report it checks for a request to stop."""

    def __init__(
        self, inner: Progress, publish: Callable[[str, int | None, int], None], check_wish: Callable[[], None]
    ) -> None:
        self._inner, self._publish, self._check_stop = inner, publish, check_wish

    @contextmanager
    def task(self, label: str, total: int | None, *, unit: Unit = "bytes") -> Iterator[Report]:
        last = 0.0

        def share(done: int) -> None:
            nonlocal last
            report(done)
            if (now := time.monotonic()) - last >= _POLL_SECONDS:
                last = now
                self._publish(label, total, done)
                self._check_stop()

        with self._inner.task(label, total, unit=unit) as report:
            share(0)
            yield share

    def say(self, line: str) -> None:
        self._inner.say(line)
