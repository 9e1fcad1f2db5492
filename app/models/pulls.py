"""The downloads of one process. They run one at a time, in the order of the requests.

Callers that request the same model share one pull. They follow its events and can leave at any time. When the last one
leaves, the pull stops and keeps the part that has arrived for the next pull. Only names of models are accepted, no
paths or addresses, so that clients of a server cannot make it read anything else.
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

_EVENT_SECONDS = 0.1  # shortest time between two events about the same task


class PullState(enum.StrEnum):
    WAITING = "waiting"  # waits for other downloads, of this or another process
    RUNNING = "running"
    DONE = "done"  # all files are stored and verified


@dataclass(frozen=True, slots=True)
class PullProgress:
    """The current state of a pull."""

    name: str  # name of the model in the catalog, or of its repository
    state: PullState
    label: str = ""  # description of the current step
    done: int = 0  # bytes
    total: int | None = None  # None: nothing to count
    stored: StoredModel | None = None  # set when the pull is done


class Pulls:
    """The pulls of one process. Call all methods from one event loop; threads do the work."""

    def __init__(self, settings: Settings, store: ModelStore | None = None) -> None:
        self._settings = settings
        self._store = store or ModelStore(settings)
        self._turn = asyncio.Lock()  # held by the running download; the lock is fair, so the first request comes first
        self._lookup = asyncio.Lock()  # held by a lookup; fair as well, so that a slow lookup does not change the order
        self._pulls: dict[str, _Pull] = {}

    async def pull(self, name: str) -> AsyncGenerator[PullProgress]:
        """Yield events until the model is stored. The last one has the state DONE. Joins a pull that already runs.

        Close the generator to leave; the pull continues while other callers follow it. Raises ModelNotFound if the name
        is not that of a model, DownloadStopped if another process stopped it, and the errors of `sources.pull`.
        """
        known = self.known_name(name)
        pull = self._pulls.get(known)
        if pull is None or pull.is_stopped:
            pull = self._start(known)
        with pull.followed():
            async for progress in pull.events():
                yield progress

    def now(self) -> list[PullProgress]:
        """Return the states of all pulls, in the order in which they were requested."""
        return [pull.latest for pull in self._pulls.values()]

    async def delete(self, name: str) -> list[Removal]:
        """Remove a stored model, or the part of it that has arrived. Its download is stopped first.

        Raises ModelNotFound, and AppError for a model that ingle has not stored.
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
        """Stop all pulls, and wait until they have ended."""
        for pull in self._pulls.values():
            pull.stop()
        await asyncio.gather(*(pull.ended() for pull in [*self._pulls.values()]))

    def known_name(self, name: str) -> str:
        """Return the canonical name of a model. Raises ModelNotFound, also for every path and address."""
        if known := self._store.known_name(name):
            return known
        near = [*self._store.catalog.similar(name), *self._store.families.similar(name)]
        remedy = f"Did you mean {near[0]}?" if near else "Give a short name from the catalog, or org/repo:QUANTIZATION."
        raise ModelNotFound(f"no model is called {name}", remedy)

    def _start(self, name: str) -> "_Pull":
        pull = _Pull(name, asyncio.get_running_loop())
        self._pulls.pop(name, None)  # moves the name to the end if an earlier pull of it is still stopping
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
        progress = _EventProgress(pull, self._is_waiting)
        return await asyncio.wrap_future(
            start_uninterruptible(lambda: sources.pull(pull.name, self._settings, progress))
        )

    def _is_there(self, name: str) -> bool:
        """Whether the model is stored, so that there is nothing to wait for. This may verify its bytes."""
        try:
            self._store.resolve(name)
        except InglenookError:
            return False
        return True

    def _is_waiting(self, name: str) -> bool:
        """Whether this process has to wait because another process is downloading another model."""
        running = running_download(self._settings.models_dir)
        return running is not None and running.pid != os.getpid() and running.name != name


class _Pull:
    """One pull and its followers.

    Any thread may call `raise_if_stopped` and `publish`. All other methods must run on the event loop.
    """

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop) -> None:
        self.name = name
        self.is_running = False  # whether it has its turn, and no longer waits for other downloads
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
        """Stop the pull: at its next progress report, or at once if it still waits."""
        self._stopped.set()
        if not self.is_running:
            self._task.cancel()

    def raise_if_stopped(self) -> None:
        """Raise DownloadStopped if the pull was stopped."""
        if self._stopped.is_set():
            raise DownloadStopped(f"the download of {self.name} was stopped", "Pull it again to resume.")

    def publish(self, progress: PullProgress) -> None:
        """Publish a new state. The worker thread calls this."""
        with suppress(RuntimeError):  # raised if the loop is closed
            self._loop.call_soon_threadsafe(self._set_latest, progress)

    def _set_latest(self, progress: PullProgress) -> None:
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
            self.raise_if_stopped()
        stored = self._task.result()
        yield PullProgress(self.name, PullState.DONE, done=stored.size, total=stored.size, stored=stored)

    async def ended(self) -> None:
        await asyncio.wait({self._task})


def _ignore_error(task: asyncio.Task[StoredModel]) -> None:
    """Mark an exception as handled: there may be no follower left to receive it."""
    if not task.cancelled():
        task.exception()


class _EventProgress:
    """Progress that publishes the events of a pull, and checks at each report whether the pull was stopped."""

    def __init__(self, pull: _Pull, is_waiting: Callable[[str], bool]) -> None:
        self._pull, self._is_waiting = pull, is_waiting

    @contextmanager
    def task(self, label: str, total: int | None, *, unit: Unit = "bytes") -> Iterator[Report]:
        state = PullState.WAITING if self._is_waiting(self._pull.name) else PullState.RUNNING
        last = 0.0

        def report(done: int) -> None:
            nonlocal last
            self._pull.raise_if_stopped()
            if (now := time.monotonic()) - last >= _EVENT_SECONDS or done == total:
                last = now
                self._pull.publish(PullProgress(self._pull.name, state, label, done, total))

        report(0)
        yield report

    def say(self, line: str) -> None:
        self._pull.raise_if_stopped()
