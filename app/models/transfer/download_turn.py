"""One download at a time on this machine, and everybody can see how it goes.

The process that downloads holds a lock, which the system takes from it however it ends, and keeps what its progress
says in a small file beside it. One that wants to download meanwhile shows that as if it were its own, until it has its
turn. A word in another file asks to stop. Refuses to know what is downloaded, and from where.
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
_ON = "What has arrived is kept: pull it again to go on."
_POLL_SECONDS = 0.25  # seconds between two looks, and two words about how it goes


@dataclass(frozen=True, slots=True)
class Running:
    """What a download says of itself."""

    pid: int
    name: str  # of the model
    label: str  # what is being done
    done: int  # bytes
    total: int | None


class DownloadTurn:
    """The turn of one model, in the folder of all models."""

    def __init__(self, models_dir: Path, name: str) -> None:
        self._folder = models_dir / _FOLDER
        self._name = name
        self._since = time.time()

    @contextmanager
    def hold(self, progress: Progress) -> Iterator[Progress]:
        """Wait until nobody else downloads; then the body may, and reports to the progress that it gets.

        Raises DownloadStopped, from what the body reports too, when it is asked to stop.
        """
        from filelock import FileLock, Timeout

        lock = FileLock(private_folder(self._folder) / _LOCK)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            self._watch(lock, progress)
        try:
            (self._folder / _STATE).unlink(missing_ok=True)  # of one that was killed
            self._check_stop()  # before the first word about how it goes, too
            yield _SharedProgress(progress, self._publish, self._check_stop)
        finally:
            (self._folder / _STATE).unlink(missing_ok=True)
            lock.release()

    def _watch(self, lock: "FileLock", progress: Progress) -> None:
        """Show how another download goes until its lock is ours."""
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
            return f"Another ingle (pid {running.pid}) is fetching {running.name}; this is how it goes."
        return f"{self._name} is next: another ingle (pid {running.pid}) is fetching {running.name}."

    def _publish(self, label: str, total: int | None, done: int) -> None:
        """Nothing depends on what this file says, so a power cut may take it."""
        partial = self._folder / f"{_STATE}.{os.getpid()}"
        with suppress(OSError):
            partial.write_text(json.dumps(asdict(Running(os.getpid(), self._name, label, done, total))))
            os.replace(partial, self._folder / _STATE)

    def _check_stop(self) -> None:
        with suppress(OSError, ValueError, KeyError, TypeError):
            request = json.loads((self._folder / _STOP).read_bytes())
            if request["name"] == self._name and float(request["at"]) >= self._since:
                raise DownloadStopped(f"{self._name} is not fetched any further: somebody asked for that", _ON)


def running_download(models_dir: Path) -> Running | None:
    """The download that goes on now, whoever does it."""
    from filelock import FileLock, Timeout

    folder = models_dir / _FOLDER
    if not (folder / _STATE).exists():
        return None
    try:
        with FileLock(folder / _LOCK).acquire(timeout=0):
            return None  # it was killed
    except Timeout:
        return _read(folder)


def ask_to_stop(models_dir: Path, name: str) -> None:
    """Ask whoever downloads a model, or waits for his turn, to leave it. Raises OSError."""
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
    """For a display that is not there yet."""


class _SharedProgress:
    """A progress that others can follow. It looks for a wish to stop whenever it says something."""

    def __init__(
        self, inner: Progress, publish: Callable[[str, int | None, int], None], check_wish: Callable[[], None]
    ) -> None:
        self._inner, self._publish, self._check_stop = inner, publish, check_wish

    @contextmanager
    def task(self, label: str, total: int | None, *, unit: Unit = "bytes") -> Iterator[Report]:
        last = 0.0

        def tell(done: int) -> None:
            nonlocal last
            report(done)
            if (now := time.monotonic()) - last >= _POLL_SECONDS:
                last = now
                self._publish(label, total, done)
                self._check_stop()

        with self._inner.task(label, total, unit=unit) as report:
            tell(0)
            yield tell

    def say(self, line: str) -> None:
        self._inner.say(line)
