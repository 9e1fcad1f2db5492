"""Lists, searches, downloads, loads, and deletes models for the screens."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from app.chat_backend.client_errors import client_errors, to_thread
from app.chat_backend.engine.connection import EngineConnection
from app.chat_backend.engine.loading_state import DownloadRate
from app.chat_backend.model_queries import check_fit, recommended, search_models, variants
from app.models.machine_memory import memory_without_gpu
from app.settings.boxes import Box, find_box, read_boxes
from app.settings.settings import Settings
from quant.errors import InglenookError
from tui.client import ClientError, NotLoaded
from tui.engine_types import Download, Fit, Loading, ModelInfo, Recommendation, SearchResults

if TYPE_CHECKING:
    from app.models.pulls import Pulls
    from app.models.store import ModelStore


class ChatModels:
    """Implements `tui.client.Models`."""

    def __init__(self, settings: Settings, connection: EngineConnection) -> None:
        self._settings = settings
        self._connection = connection
        self._pull_queue: Pulls | None = None
        self._paths: dict[str, None] = {}  # models that the user named by a path, in order of their use

    async def installed(self) -> Sequence[ModelInfo]:
        """Return the models on this machine, or those of the remote endpoint."""
        if self._connection.is_remote:
            offered = await self._connection.offered_models()
            return [
                ModelInfo(one.name, loaded=one.name == self._connection.answering, elsewhere=True) for one in offered
            ]

        def listed() -> Sequence[ModelInfo]:
            from app.chat_backend.model_lists import installed_models, path_model, without_embedding_models

            answering = self._connection.answering
            store = self._store()
            found = without_embedding_models(installed_models(store, answering, self._fetching()), store)
            others = [path for path in self._paths if Path(path).exists() and path not in {one.name for one in found}]
            return [*(path_model(path, answering) for path in others), *found]

        self._note_path()
        here, others = await asyncio.gather(to_thread(listed), self._models_of_boxes())
        return [*await self._with_speeds(here), *others]

    async def _models_of_boxes(self) -> Sequence[ModelInfo]:
        """Return the models of the user's other machines that generate text. Machines that are away have none."""
        boxes = await to_thread(read_boxes, self._settings.state_dir)
        if not boxes:
            return ()
        from app.client.boxes import models_of_all

        answers = await models_of_all(boxes.values())
        found = chain.from_iterable(answer for answer in answers.values() if not isinstance(answer, InglenookError))
        answering = self._connection.answering
        return [
            ModelInfo(one.name, size=one.size or None, loaded=one.name == answering, elsewhere=True)
            for one in found
            if one.kind == "chat"
        ]

    def _box_of(self, name: str) -> Box | None:
        return find_box(name, self._settings.state_dir)

    async def catalog(self) -> Sequence[ModelInfo]:
        """Return the catalog; empty for a remote endpoint, because it cannot download models."""
        if self._connection.is_remote:
            return ()
        memory, rate = await self._memory(), await self._decode_rate()

        def listed() -> Sequence[ModelInfo]:
            from app.chat_backend import model_lists

            store = self._store()
            found = model_lists.catalog_models(store, self._connection.answering, self._fetching(), memory)
            chats = model_lists.without_embedding_models(found, store)
            return model_lists.mark_recommended(model_lists.with_speeds(chats, store, rate), store)

        return await to_thread(listed)

    async def _with_speeds(self, models: Sequence[ModelInfo]) -> Sequence[ModelInfo]:
        """Add the expected speeds, if any are known."""
        from app.chat_backend.model_lists import with_speeds

        rate = await self._decode_rate()
        return await to_thread(lambda: with_speeds(models, self._store(), rate))

    async def _decode_rate(self) -> float:
        """Return the decode rate in bytes per second: the measured one, or that of a slow CPU; 0: unknown."""
        from app.models.decode_rate import likely_rate, remembered_rate

        rate = await self._connection.decode_rate()
        if not rate and (earlier := await to_thread(remembered_rate, self._settings.state_dir)):
            rate = earlier.bytes_per_second
        if self._connection.is_remote:
            return rate
        device = "cuda" if await to_thread(memory_without_gpu) is None else "cpu"
        return likely_rate(device, rate)

    def _note_path(self) -> None:
        """Remember the loaded model if the user named it by its path, so that it stays in the list."""
        if Path(self._connection.answering).is_absolute():
            self._paths[self._connection.answering] = None

    def offline_reason(self) -> str:
        is_offline = self._settings.offline and not self._connection.is_remote
        return f"offline mode is on ({self._settings.origins['offline']})" if is_offline else ""

    def endpoint(self) -> str:
        return self._connection.endpoint

    async def recommended(self) -> Recommendation | None:
        if self._connection.is_chosen or self._settings.offline or any(one.installed for one in await self.installed()):
            return None
        with client_errors():
            return await recommended(self._settings)

    async def search(self, text: str) -> SearchResults:
        self._require_local()
        with client_errors():
            finds = await search_models(text, await self._connection.reclaimable_memory())
        if not finds.note:
            return replace(finds, models=tuple(await self._with_local_state(finds.models)))
        known = {model.name: model for model in await self.catalog()}
        return replace(finds, models=tuple(known.get(find.name, find) for find in finds.models))

    async def variants(self, name: str) -> Sequence[ModelInfo]:
        self._require_local()
        return await self._with_local_state(await to_thread(variants, name, self._settings, await self._memory()))

    async def _with_local_state(self, finds: Sequence[ModelInfo]) -> Sequence[ModelInfo]:
        """Mark search results that are installed, loaded, or partly downloaded."""
        here = {model.name: model for model in await self.installed()}
        return await self._with_speeds(
            [
                replace(find, installed=one.installed, loaded=one.loaded, arrived=one.arrived)
                if (one := here.get(find.name))
                else find
                for find in finds
            ]
        )

    async def find(self, name: str) -> ModelInfo:
        if self._connection.is_remote or self._box_of(name):
            return ModelInfo(name, elsewhere=True)
        memory = await self._memory()

        def look() -> ModelInfo:
            from app.chat_backend.model_lists import named_model

            self._store().check_name(name)
            return named_model(name, self._store(), self._connection.answering, self._fetching(), memory)

        return await to_thread(look)

    async def free_disk(self) -> int | None:
        def look() -> int:
            from app.models.transfer.incoming import free_space

            return min(free_space(self._settings.models_dir), free_space(self._settings.hub_cache))

        return await to_thread(look)

    async def fit(self, name: str) -> Fit:
        if self._connection.is_remote:
            length = next(
                (one.context_length for one in await self._connection.offered_models() if one.name == name), None
            )
            words = "context length unknown" if length is None else f"{length:,} tokens of context"
            return Fit(f"On the endpoint; {words}", is_possible=True)
        if (box := self._box_of(name)) is not None:
            return Fit(f"On your machine {box.name}", is_possible=True)
        if name == self._connection.model and self._connection.context_length is not None:
            return Fit(f"In use · {self._connection.context_length:,}-token context", is_possible=True)
        with client_errors():
            return await check_fit(name, self._settings, await self._connection.reclaimable_memory())

    async def _memory(self) -> int | None:
        """Return the bytes available to another model, or None if unknown."""
        return await self._connection.reclaimable_memory() or await to_thread(memory_without_gpu)

    async def pull(self, name: str) -> AsyncGenerator[Download, None]:
        self._require_local()
        is_awaited = await to_thread(self._is_awaited, name)
        async with aclosing(self._pulled_by_engine() if is_awaited else self._pulled(name)) as steps:
            async for step in steps:
                yield step

    async def _pulled(self, name: str) -> AsyncGenerator[Download, None]:
        from app.models.pulls import PullState

        rate = DownloadRate()
        with client_errors():
            async with aclosing(self._pulls().pull(name)) as events:
                async for now in events:
                    stage = "" if now.state is PullState.RUNNING and now.total else now.label or now.state.value
                    yield Download(now.done, now.total, rate.after(now.label, now.done), stage)

    def _is_awaited(self, name: str) -> bool:
        """Whether the engine is loading this model, also if loading is paused."""
        from app.models.transfer.download_queue import is_same_model

        store = self._store()
        known, awaited = store.known_name(name), store.known_name(self._connection.awaited)
        return known is not None and awaited is not None and is_same_model(known, awaited)

    def _fetching(self) -> str:
        """Return the name of the model that the engine is downloading, or ""."""
        return "" if self._connection.is_paused else self._store().known_name(self._connection.awaited) or ""

    async def _pulled_by_engine(self) -> AsyncGenerator[Download, None]:
        """Follow the engine's download until the model is loaded. Canceling pauses the download
        for all followers.
        """
        self._connection.resume()
        rate = DownloadRate()
        try:
            async with aclosing(self._connection.loading()) as states:
                async for now in states:
                    if self._connection.is_paused:
                        raise NotLoaded(f"{now.model} is paused")
                    running = await asyncio.to_thread(self._connection.fetching)
                    if running is None:
                        yield Download(0, None, 0.0, now.stage_and_amount)
                    else:
                        yield Download(running.done, running.total, rate.after(running.label, running.done))
        except ClientError as problem:
            raise NotLoaded(problem.message, problem.remedy) from problem
        except (asyncio.CancelledError, GeneratorExit):
            self._connection.pause()
            raise

    async def delete(self, name: str) -> None:
        self._require_local()
        store = self._store()
        if store.known_name(name) is None:  # installed by another tool, or from the web
            await to_thread(store.remove, name)
            return
        with client_errors():
            await self._pulls().delete(name)

    def _require_local(self) -> None:
        """Raise ClientError if a remote endpoint is used, because it manages its models itself."""
        if self._connection.is_remote:
            raise ClientError(
                "this endpoint manages its models itself", "To use other models, start ingle without --endpoint."
            )

    def _store(self) -> "ModelStore":
        from app.models.store import ModelStore

        return ModelStore(self._settings)

    def _pulls(self) -> "Pulls":
        """Return the download queue of this process. It is created on first use, on the event loop that uses it."""
        from app.models.pulls import Pulls

        if self._pull_queue is None:
            self._pull_queue = Pulls(self._settings)
        return self._pull_queue

    async def close(self) -> None:
        """Stop all downloads. Partial downloads are kept."""
        if self._pull_queue is not None:
            await self._pull_queue.close()

    async def waits_for_replies(self, name: str) -> bool:
        return await self._connection.waits_for_replies(name)

    async def load(self, name: str) -> AsyncGenerator[Loading, None]:
        if not self._connection.is_remote and self._box_of(name) is None:
            await to_thread(self._store().check_name, name)
        self._note_path()
        wanted = self._connection.switch(name)
        try:
            async with aclosing(self._connection.loading()) as states:
                async for state in states:
                    yield state
        except (asyncio.CancelledError, GeneratorExit):
            self._connection.cancel_switch(wanted)
            raise
