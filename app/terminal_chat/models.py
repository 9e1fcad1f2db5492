"""The models of the port: those on this machine, those that could be, and how they come and go."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from app.config import Settings
from app.terminal_chat.download_rate import DownloadRate
from app.terminal_chat.engine_slot import EngineSlot
from app.terminal_chat.hub_finds import found, recommended, variants
from app.terminal_chat.told import apart, told
from tui.engine_nouns import Download, Loading, Model

if TYPE_CHECKING:
    from app.models.catalog import CatalogEntry
    from app.models.pulls import Pulls
    from app.models.store import ModelStore
    from app.models.stored_model import StoredModel


class ChatModels:
    """Implements `tui.client.Models`."""

    def __init__(self, settings: Settings, slot: EngineSlot) -> None:
        self._settings = settings
        self._slot = slot
        self._made: Pulls | None = None

    async def installed(self) -> Sequence[Model]:
        """Those whose download was not finished come last."""

        def listed() -> Sequence[Model]:
            from app.models.download_queue import FetchState, fetches

            store = self._store()
            left = fetches(store.hub_models, self._settings.models_dir)
            return [
                *map(self._stored, store.entries()),
                *(Model(one.name, size=one.total, arrived=one.done) for one in left if one.state is FetchState.STOPPED),
            ]

        return await apart(listed)

    async def catalog(self) -> Sequence[Model]:
        def listed() -> Sequence[Model]:
            store = self._store()
            here = {stored.name for stored in store.entries()}
            return [
                *(self._of_catalog(entry, installed=entry.name in here) for entry in store.catalog),
                *(
                    Model(known.name, license=known.license, installed=str(known.repository) in here)
                    for known in store.families
                ),
            ]

        return await apart(listed)

    def _stored(self, stored: "StoredModel") -> Model:
        return Model(
            name=stored.name,
            quantization=stored.quantization or "",
            size=stored.size,
            installed=True,
            loaded=stored.name == self._slot.model,
        )

    def _of_catalog(self, entry: "CatalogEntry", *, installed: bool) -> Model:
        return Model(
            name=entry.name,
            quantization=entry.quantization,
            size=entry.size,
            license=entry.license,
            installed=installed,
            loaded=entry.name == self._slot.model,
        )

    async def recommended(self) -> Model | None:
        if self._slot.is_chosen or self._settings.offline or await self.installed():
            return None
        with told():
            return await recommended(self._settings)

    async def search(self, text: str) -> Sequence[Model]:
        with told():
            return await found(text)

    async def variants(self, name: str) -> Sequence[Model]:
        return await apart(variants, name, self._settings)

    async def pull(self, name: str) -> AsyncGenerator[Download, None]:
        from app.models.pulls import PullState

        rate = DownloadRate()
        with told():
            async with aclosing(self._pulls().pull(name)) as events:
                async for now in events:
                    stage = "" if now.state is PullState.RUNNING and now.total else now.label or now.state.value
                    yield Download(now.done, now.total, rate.after(now.label, now.done), stage)

    async def delete(self, name: str) -> None:
        with told():
            await self._pulls().delete(name)

    def _check_name(self, name: str) -> None:
        """Raises ModelNotFound for what no model is called: nothing is unloaded for that."""
        from app.models.web_models import WebName

        store = self._store()
        if store.known_name(name) is None and WebName.parse(name) is None:
            store.resolve(name)

    def _store(self) -> "ModelStore":
        from app.models.store import ModelStore

        return ModelStore(self._settings)

    def _pulls(self) -> "Pulls":
        """Those of this program, made on the event loop that uses them."""
        from app.models.pulls import Pulls

        if self._made is None:
            self._made = Pulls(self._settings)
        return self._made

    async def close(self) -> None:
        """Stop what is being fetched; what has arrived is kept."""
        if self._made is not None:
            await self._made.close()

    async def load(self, name: str) -> AsyncGenerator[Loading, None]:
        if not self._slot.is_remote:
            await apart(self._check_name, name)
        self._slot.switch(name)
        async with aclosing(self._slot.loading()) as states:
            async for state in states:
                yield state
