"""The models of the port: those on this machine, those that could be, and how they come and go."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager, suppress

from app.config import Settings
from app.errors import DownloadStopped
from app.models.catalog import CatalogEntry
from app.models.store import ModelStore
from app.models.stored_model import StoredModel
from app.progress import Report, Unit
from app.terminal_chat.download_rate import DownloadRate
from app.terminal_chat.engine_slot import EngineSlot
from app.terminal_chat.told import apart
from tui.client import ClientError
from tui.engine_nouns import Download, Loading, Model


class ChatModels:
    """Implements `tui.client.Models`."""

    def __init__(self, settings: Settings, slot: EngineSlot) -> None:
        self._settings = settings
        self._slot = slot

    async def installed(self) -> Sequence[Model]:
        entries = await apart(lambda: ModelStore(self._settings).entries())
        return [self._stored(stored) for stored in entries]

    async def catalog(self) -> Sequence[Model]:
        def listed() -> Sequence[Model]:
            store = ModelStore(self._settings)
            names = {stored.name for stored in store.entries()}
            return [self._of_catalog(entry, installed=entry.name in names) for entry in store.catalog]

        return await apart(listed)

    def _stored(self, stored: StoredModel) -> Model:
        return Model(
            name=stored.name,
            quantization=stored.quantization or "",
            size=stored.size,
            installed=True,
            loaded=stored.name == self._slot.model,
        )

    def _of_catalog(self, entry: CatalogEntry, *, installed: bool) -> Model:
        return Model(
            name=entry.name,
            quantization=entry.quantization,
            size=entry.size,
            license=entry.license,
            installed=installed,
            loaded=entry.name == self._slot.model,
        )

    async def search(self, text: str) -> Sequence[Model]:
        raise ClientError("the Hub cannot be searched from here yet", f"https://huggingface.co/models?search={text}")

    async def variants(self, name: str) -> Sequence[Model]:
        return [model for model in [*await self.installed(), *await self.catalog()] if model.name == name][:1]

    async def pull(self, name: str) -> AsyncGenerator[Download, None]:
        telling = _Telling(asyncio.get_running_loop())
        work = asyncio.ensure_future(apart(self._pull, name, telling))
        work.add_done_callback(lambda _: telling.wake())
        try:
            while not work.done():
                await telling.changed()
                if (now := telling.now) is not None:
                    yield now
            await work
        finally:
            telling.stopped.set()
            with suppress(ClientError, asyncio.CancelledError):
                await work

    def _pull(self, name: str, progress: "_Telling") -> None:
        from app.models.sources import pull

        pull(name, self._settings, progress)

    async def delete(self, name: str) -> None:
        await apart(lambda: ModelStore(self._settings).remove(name))

    async def load(self, name: str) -> AsyncGenerator[Loading, None]:
        self._slot.switch(name)
        async for state in self._slot.state.states():
            yield state


class _Telling:
    """A progress that an event loop reads. What reports to it is stopped by DownloadStopped."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.now: Download | None = None
        self.stopped = threading.Event()
        self._loop = loop
        self._changed = asyncio.Event()
        self._rate = DownloadRate()

    @contextmanager
    def task(self, label: str, total: int | None, *, unit: Unit = "bytes") -> Iterator[Report]:
        def report(done: int) -> None:
            if self.stopped.is_set():
                raise DownloadStopped("the download is paused", "Pull it again to go on.")
            stage = "" if label.startswith("Downloading") else label
            self._tell(Download(done, total, self._rate.after(label, done), stage))

        report(0)
        yield report

    def say(self, line: str) -> None:
        pass

    def _tell(self, now: Download) -> None:
        self.now = now
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self.wake)

    def wake(self) -> None:
        self._changed.set()

    async def changed(self) -> None:
        await self._changed.wait()
        self._changed.clear()
