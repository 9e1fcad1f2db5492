"""The pulls of one process: each runs once for all who ask for it, one after another, in the order of asking.

Callers follow the events of a pull and may leave at any time. When the last one leaves, the pull stops and keeps what
has arrived for the next pull. Only names of models are accepted, no paths or addresses, so that clients of a server
cannot have it read anything else.
"""

import asyncio
import enum
import os
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from app.errors import DownloadStopped, ModelNotFound
from app.models import sources
from app.models.store import ModelStore
from app.models.stored_model import Removal, StoredModel
from app.models.transfer.download_queue import queue_note
from app.models.transfer.download_turn import ask_to_stop, running_download
from app.process.uninterruptible import start_uninterruptible
from app.progress import Report, Unit
from app.settings.settings import Settings
from quant.errors import InglenookError

_EVENT_SECONDS = 0.1  # seconds between two events about the same task


class PullState(enum.StrEnum):
    WAITING = "waiting"  # for others that go first, of this process or of another
    RUNNING = "running"
    DONE = "done"  # all of it is stored, and its bytes are those that were promised


@dataclass(frozen=True, slots=True)
class PullProgress:
    """How a pull goes: what is true now, not what has changed."""

    name: str  # of the model: one of the catalog, or that of a repository
    state: PullState
    label: str = ""  # what is being done, for people
    done: int = 0  # bytes
    total: int | None = None  # None: nothing to count
    stored: StoredModel | None = None  # when it is done


class Pulls:
    """The pulls of one process. All methods belong to one event loop; the work is done in threads."""

    def __init__(self, settings: Settings, store: ModelStore | None = None) -> None:
        self._settings = settings
        self._store = store or ModelStore(settings)
        self._turn = asyncio.Lock()  # fair: who asked first goes first
        self._lookup = asyncio.Lock()  # fair, too: no look that takes longer changes the order
        self._pulls: dict[str, _Pull] = {}

    async def pull(self, name: str) -> AsyncGenerator[PullProgress]:
        """Events until the model is stored, the last of them with state DONE. One that goes on already is joined.

        Close the generator to leave: others that follow the pull keep it going. Raises ModelNotFound for what is not
        the name of a model, DownloadStopped where it was stopped from elsewhere, and what `sources.pull` raises.
        """
        known = self.known_name(name)
        pull = self._pulls.get(known)
        if pull is None or pull.is_stopped:
            pull = self._start(known)
        with pull.followed():
            async for progress in pull.events():
                yield progress

    def now(self) -> list[PullProgress]:
        """How all pulls go, in the order in which they were asked for."""
        return [pull.latest for pull in self._pulls.values()]

    async def delete(self, name: str) -> list[Removal]:
        """Remove a stored model, or what has arrived of it; a download of it is stopped first.

        Raises ModelNotFound, and AppError for what ingle has not stored.
        """
        known = self.known_name(name)
        if pull := self._pulls.get(known):
            pull.stop()
            await pull.ended()
        running = running_download(self._settings.models_dir)
        if running and running.name == known:
            ask_to_stop(self._settings.models_dir, known)
        return await asyncio.to_thread(self._store.remove, known)

    async def close(self) -> None:
        """Stop all pulls, and wait for the word that is under way."""
        for pull in self._pulls.values():
            pull.stop()
        await asyncio.gather(*(pull.ended() for pull in [*self._pulls.values()]))

    def known_name(self, name: str) -> str:
        """The one name of a model that has several. Raises ModelNotFound, for every path and every address too."""
        if known := self._store.known_name(name):
            return known
        near = [*self._store.catalog.similar(name), *self._store.families.similar(name)]
        remedy = f"Did you mean {near[0]}?" if near else "Give a short name of the catalog, or org/repo:QUANTIZATION."
        raise ModelNotFound(f"no model is called {name}", remedy)

    def _start(self, name: str) -> "_Pull":
        pull = _Pull(name, asyncio.get_running_loop())
        self._pulls.pop(name, None)  # of one that is being stopped
        self._pulls[name] = pull
        pull.start(self._run(pull))
        return pull

    async def _run(self, pull: "_Pull") -> StoredModel:
        try:
            async with self._lookup:
                is_there = await asyncio.to_thread(self._is_there, pull.name)
            if is_there:
                return await self._fetch(pull)
            with queue_note(self._settings.models_dir, [pull.name]):
                async with self._turn:
                    return await self._fetch(pull)
        finally:
            if self._pulls.get(pull.name) is pull:
                del self._pulls[pull.name]

    async def _fetch(self, pull: "_Pull") -> StoredModel:
        pull.is_running = True
        shown = _EventProgress(pull, self._is_waiting)
        return await asyncio.wrap_future(start_uninterruptible(lambda: sources.pull(pull.name, self._settings, shown)))

    def _is_there(self, name: str) -> bool:
        """Whether there is nothing to wait for: at most, its bytes are looked at."""
        try:
            self._store.resolve(name)
        except InglenookError:
            return False
        return True

    def _is_waiting(self, name: str) -> bool:
        """Whether what is shown is another process's download of another model."""
        running = running_download(self._settings.models_dir)
        return running is not None and running.pid != os.getpid() and running.name != name


class _Pull:
    """One pull, and those who follow it. But for `check` and `tell`, it belongs to the event loop."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop) -> None:
        self.name = name
        self.is_running = False  # it is its turn
        self.latest = PullProgress(name, PullState.WAITING)
        self._loop = loop
        self._changed = asyncio.Event()
        self._stopped = threading.Event()
        self._followers = 0

    def start(self, work: Coroutine[Any, Any, StoredModel]) -> None:
        self._task = self._loop.create_task(work)
        self._task.add_done_callback(_ignore_error)

    @property
    def is_stopped(self) -> bool:
        return self._stopped.is_set()

    def stop(self) -> None:
        """It ends with the next word about how it goes; at once, where it is not its turn yet."""
        self._stopped.set()
        if not self.is_running:
            self._task.cancel()

    def check(self) -> None:
        """Raise DownloadStopped once it is stopped."""
        if self._stopped.is_set():
            raise DownloadStopped(f"{self.name} is not fetched any further", "Pull it again to go on.")

    def tell(self, progress: PullProgress) -> None:
        """Called by the thread that does the work."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._take, progress)

    def _take(self, progress: PullProgress) -> None:
        self.latest = progress
        self._changed.set()
        self._changed = asyncio.Event()

    @contextmanager
    def followed(self) -> Iterator[None]:
        self._followers += 1
        try:
            yield
        finally:
            self._followers -= 1
            if not self._followers and not self._task.done():
                self.stop()

    async def events(self) -> AsyncGenerator[PullProgress]:
        seen: PullProgress | None = None
        while not self._task.done():
            changed = self._changed
            if self.latest is not seen:
                seen = self.latest
                yield seen
            else:
                waiting = asyncio.ensure_future(changed.wait())
                await asyncio.wait({waiting, self._task}, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
        if self._task.cancelled():
            self.check()
        stored = self._task.result()
        yield PullProgress(self.name, PullState.DONE, done=stored.size, total=stored.size, stored=stored)

    async def ended(self) -> None:
        await asyncio.wait({self._task})


def _ignore_error(task: asyncio.Task[StoredModel]) -> None:
    """What went wrong is no surprise where nobody follows any more."""
    if not task.cancelled():
        task.exception()


class _EventProgress:
    """The progress of a pull as events. It looks whether to go on whenever something is reported."""

    def __init__(self, pull: _Pull, is_waiting: Callable[[str], bool]) -> None:
        self._pull, self._is_waiting = pull, is_waiting

    @contextmanager
    def task(self, label: str, total: int | None, *, unit: Unit = "bytes") -> Iterator[Report]:
        state = PullState.WAITING if self._is_waiting(self._pull.name) else PullState.RUNNING
        last = 0.0

        def tell(done: int) -> None:
            nonlocal last
            self._pull.check()
            if (now := time.monotonic()) - last >= _EVENT_SECONDS or done == total:
                last = now
                self._pull.tell(PullProgress(self._pull.name, state, label, done, total))

        tell(0)
        yield tell

    def say(self, line: str) -> None:
        self._pull.check()
