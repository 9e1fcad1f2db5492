"""ModelLoader: loads stored models into services for the residents of a server. Importing it imports torch.

Its methods run on threads, except `start` and `close` of the loaded models, which run on the event loop.
"""

import asyncio
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

from app.errors import ModelNotFound
from app.generation.embedding_service import EmbeddingService
from app.generation.options import API_DEFAULTS, DefaultSampling
from app.generation.recent_replies import RecentReplies
from app.generation.reply_token_cache import ReplyTokenCache
from app.generation.service import ChatService
from app.generation.template import ChatTemplateRenderer
from app.generation.token_streams import SuspendedReplies, TokenStreams
from app.models.decode_rate import DecodeRate, decode_rate, remember_rate
from app.models.details import ModelFacts, details_of
from app.models.fit import advice, fit_stored, memory_plans
from app.models.load.draft_models import planned_draft_model
from app.models.load.kernel_preparation import chat_options, common_options
from app.models.load.load_errors import converting_load_errors
from app.models.load.loaded_encoder import is_embedding_model, load_encoder_model
from app.models.load.loaded_model import ChatModel, load_model
from app.models.load.planned_memory import (
    LoadPlan,
    Variant,
    advice_on,
    least_bytes,
    memory_name,
    tokenizer_bytes,
)
from app.models.residency.advice import Advice
from app.models.residency.ledger import HOST, Bytes
from app.models.residency.resident import LoadTask, Needs, Suspended
from app.models.store import ModelStore
from app.models.stored_model import StoredModel
from app.progress import Progress, Report, Unit
from app.settings.settings import Settings
from engine.backends.device_choice import gpu_for
from engine.cpu_threads import ThreadPool
from engine.errors import UnsupportedModel
from engine.fit import MemoryPlan, fit
from engine.freed_memory import trim
from engine.kv.budget import USEFUL_CONTEXT
from engine.kv.parked_cache import ParkedCache
from engine.load_options import LoadControl, LoadOptions
from engine.loading import open_checkpoint
from engine.system_memory import available_memory, resident_bytes, total_memory
from engine.turns import Turns
from quant.errors import InglenookError

CUDA = "cuda"
CONTEXTS = (131_072, 65_536, 32_768, 16_384, 8_192, 4_096)  # contexts that are tried to let two models fit together


class TaskProgress:
    """Reports the progress of a load to its `LoadTask` as well, and stops the load if the task says so."""

    def __init__(self, task: LoadTask, shown: Progress) -> None:
        self._task = task
        self._shown = shown

    @contextmanager
    def task(self, label: str, total: int | None, *, unit: Unit = "bytes") -> Iterator[Report]:
        self._task.check()
        self._task.stage, self._task.done, self._task.total, self._task.unit = label, 0, total, unit
        with self._shown.task(label, total, unit=unit) as report:

            def report_and_check(done: int) -> None:
                self._task.check()
                self._task.done = done
                report(done)

            yield report_and_check

    def say(self, line: str) -> None:
        self._shown.say(line)


class LoadedChat:
    """A loaded model that generates text. See `app.models.residency.resident.Loaded`."""

    def __init__(
        self,
        model: ChatModel,
        service: ChatService,
        renderer: ChatTemplateRenderer,
        settings: Settings,
        memory: str,  # name of the memory in which the model computes
    ) -> None:
        self._memory = memory
        self.service = service
        self.weight_bytes = model.weight_bytes
        self._model = model
        self._renderer = renderer
        self._settings = settings
        self._tokenizer = tokenizer_bytes(model.tokenizer.vocab_size)
        self._touched = 0.0  # largest share of the blocks that had content so far
        self._preparing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.service.streams.start()
        self._preparing = asyncio.create_task(self.service.prepare_when_idle())

    def memories(self) -> Mapping[str, Bytes]:
        config, state = self._model.engine.config, self.service.streams.state()
        if state.kv_blocks:
            self._touched = max(self._touched, (state.kv_blocks_held + state.kv_blocks_cached) / state.kv_blocks)
        cache = sum(group.num_blocks * group.block_bytes for group in config.groups)
        pool = sum(group.host_blocks * group.block_bytes for group in config.groups)
        needs = self._model.needs
        if config.backend != CUDA:
            return {HOST: Bytes(needs.weights, needs.steps, cache, pool, round(self._touched * cache), self._tokenizer)}
        return {
            self._memory: Bytes(needs.weights, needs.steps, cache, touched=cache),
            HOST: Bytes(host_pool=pool, touched=pool, tokenizer=self._tokenizer),
        }

    @property
    def is_running(self) -> bool:
        return bool(self.service.streams.requests())

    @property
    def failure(self) -> str:
        return self.service.failure

    @property
    def needs_restart(self) -> bool:
        return self._model.engine.config.backend == CUDA

    def can_suspend(self, uses: int) -> bool:
        return not self.service.preparation.is_busy and self.service.streams.can_suspend(uses)

    async def suspend(self) -> tuple[SuspendedReplies, ParkedCache | None]:
        return SuspendedReplies(self.service.streams), await self._close(self.service.suspend())

    def resume(self, suspended: Suspended) -> None:
        if not isinstance(suspended, SuspendedReplies):
            raise TypeError("the requests were suspended by another kind of model")
        self.service.streams.resume(suspended.streams)

    async def close(self, *, parks: bool) -> ParkedCache | None:
        return await self._close(self.service.stop(parks=parks))

    async def _close(self, stop: Awaitable[ParkedCache | None]) -> ParkedCache | None:
        if self._preparing is not None:
            self._preparing.cancel()
        seconds = self.service.streams.state().decode_seconds
        measured = DecodeRate(self._model.engine.config.backend, decode_rate(self.weight_bytes, seconds))
        try:
            parked = await stop
        finally:
            self._renderer.close()
        await asyncio.to_thread(remember_rate, self._settings.state_dir, measured)
        return parked


class LoadedEmbedder:
    """A loaded model that returns vectors or ranks documents. See `app.models.residency.resident.Loaded`."""

    weight_bytes = 0
    needs_restart = False

    def __init__(self, service: EmbeddingService, memories: Mapping[str, Bytes]) -> None:
        self.service = service
        self._memories = memories

    async def start(self) -> None:
        """Do nothing: the threads of the encoder run already."""

    def memories(self) -> Mapping[str, Bytes]:
        return self._memories

    @property
    def is_running(self) -> bool:
        return self.service.requests > 0

    @property
    def failure(self) -> str:
        return self.service.failure

    def can_suspend(self, uses: int) -> bool:
        return False

    async def suspend(self) -> tuple[Suspended, ParkedCache | None]:
        raise TypeError("the requests of an embedding model cannot be suspended")

    def resume(self, suspended: Suspended) -> None:
        raise TypeError("the requests of an embedding model cannot be suspended")

    async def close(self, *, parks: bool) -> ParkedCache | None:
        await self.service.stop()
        return None


class ModelLoader:
    """Loads the models of one server. See `app.models.residency.resident.Loader`."""

    def __init__(
        self,
        settings: Settings,
        store: ModelStore,
        given: Mapping[str, StoredModel],
        names: Mapping[str, str],
        progress: Progress,
    ) -> None:
        """`given` are models by the names under which they are loaded, also those at a path. `names` are the names of
        their services. `progress` shows loads to the user of the server.
        """
        self.recent = RecentReplies()  # of all models
        self._settings = settings
        self._store = store
        self._given = given
        self._names = names
        self._progress = progress
        self._turns = Turns()
        self._shared = LoadOptions(cpu_threads=ThreadPool(), turns=self._turns)  # all models share the CPU
        self._replies = ReplyTokenCache(settings.replies_dir)
        self._describing = ChatTemplateRenderer()  # renders templates of models that are not loaded

    def stored(self, name: str) -> StoredModel:
        """Return the stored model with a name. Raises ModelNotFound if it is not on this machine any more."""
        found = self._given.get(name) or self._store.find_known(name)
        if found is None:
            raise ModelNotFound(f"{name} is not on this machine", f"ingle pull {name}")
        if not found.path.exists():
            raise ModelNotFound(f"The files of {found.title} were removed: {found.path}", "Restore them.")
        return found

    def remedy(self, name: str) -> str:
        found: Sequence[str] = ()
        with suppress(InglenookError, OSError):
            found = list(advice(fit_stored(self.stored(name), self._settings_of(name))))
        return "; ".join(found) or "Choose a smaller model or a shorter context (ingle fit shows which fit)."

    def _settings_of(self, name: str) -> Settings:
        """Return the settings with which a model is loaded."""
        return self._settings.for_model(name, self._names.get(name, name))

    def available(self) -> Mapping[str, int]:
        gpu = gpu_for(common_options(self._settings))
        free = {HOST: available_memory()}
        return free if gpu is None else {**free, memory_name(gpu.index): gpu.free_memory()}

    def capacity(self) -> Mapping[str, int]:
        gpu = gpu_for(common_options(self._settings))
        size = {HOST: total_memory()}
        return size if gpu is None else {**size, memory_name(gpu.index): gpu.card.memory_bytes}

    def process_memory(self) -> Mapping[str, int]:
        held, resident = dict[str, int](), resident_bytes()
        if resident is not None:
            held[HOST] = resident
        with suppress(RuntimeError, UnsupportedModel):  # the GPU may have stopped working
            if gpu := gpu_for(common_options(self._settings)):
                held[memory_name(gpu.index)] = gpu.own_memory()
        return held

    def needs(self, name: str) -> Needs:
        with converting_load_errors(name):
            planned = self._plan(name)
            return Needs(least_bytes(planned.useful), least_bytes(planned.plan))

    def _plan(self, name: str) -> LoadPlan:
        settings = self._settings_of(name)
        useful = replace(settings, context=settings.context or USEFUL_CONTEXT)
        return LoadPlan(*self._memory_plans(name, settings, [settings, useful]))

    def _memory_plans(self, name: str, settings: Settings, variants: Sequence[Settings]) -> list[MemoryPlan]:
        """Return the plans of a model with variants of its settings, and with its draft model, if it has one."""
        stored = self.stored(name)
        plans = memory_plans(stored, variants)
        if settings.draft_name is None or is_embedding_model(stored):
            return plans
        draft = planned_draft_model(stored, settings, chat_options(settings))
        return [replace(plan, draft=draft) for plan in plans]

    def together(self, names: tuple[str, str], available: Mapping[str, int]) -> Advice:
        first, second = names
        variants = [*self._variants(first, second, "")]
        with suppress(UnsupportedModel):  # the device has no other type of keys and values
            variants += self._variants(first, second, "int8" if variants[0].is_on_cpu else "fp8")
        return advice_on((self._plan(first), self._plan(second)), variants, available)

    def _variants(self, first: str, second: str, kv_type: str) -> Iterator[Variant]:
        """Yield the plans of two models with several contexts, the longest first. An empty `kv_type` is unchanged."""
        plans = (self._plans_of_contexts(name, kv_type) for name in (first, second))
        for context, one, other in zip(CONTEXTS, *plans, strict=True):
            yield Variant(context, kv_type, (one, other))

    def _plans_of_contexts(self, name: str, kv_type: str) -> Iterator[LoadPlan]:
        settings = self._settings_of(name)
        settings = replace(settings, kv_type=kv_type or settings.kv_type)
        contexts = [min(context, settings.context or context) for context in CONTEXTS]
        changed = [replace(settings, context=context) for context in contexts]
        return (LoadPlan(plan, plan) for plan in self._memory_plans(name, settings, changed))

    def load(
        self, name: str, allotted: Mapping[str, int], task: LoadTask, parked: ParkedCache | None
    ) -> LoadedChat | LoadedEmbedder:
        try:
            with converting_load_errors(name):
                loaded = self._load(name, allotted, task, parked)
        except BaseException:
            self._drop_gpu_caches()
            raise
        trim()  # the header of the file and the tables of its tokenizer were in memory during the load
        return loaded

    def _drop_gpu_caches(self) -> None:
        """Return memory that torch keeps after a failed load, because the driver does not report it as free."""
        with suppress(RuntimeError, UnsupportedModel):  # the GPU may have stopped working
            if gpu := gpu_for(common_options(self._settings)):
                gpu.drop_caches()

    def _load(
        self, name: str, allotted: Mapping[str, int], task: LoadTask, parked: ParkedCache | None
    ) -> LoadedChat | LoadedEmbedder:
        stored, progress, planned = self.stored(name), TaskProgress(task, self._progress), self._plan(name)
        plan, taken = planned.plan, planned.of_engine(allotted[planned.memory])
        options = replace(
            plan.allotted(self._shared, taken, max(0, allotted.get(HOST, 0) - tokenizer_bytes(plan.vocab_size))),
            control=LoadControl(lambda: task.is_stopped, self._turns.is_active),
        )
        if is_embedding_model(stored):
            return self._load_embedder(name, stored, plan, options, progress)
        return self._load_chat(name, stored, plan, options, progress, parked)

    def _load_embedder(
        self, name: str, stored: StoredModel, plan: MemoryPlan, options: LoadOptions, progress: Progress
    ) -> LoadedEmbedder:
        model = load_encoder_model(stored, self._settings_of(name), progress, options)
        with ExitStack() as undo:
            undo.callback(model.encoder.close)
            service = EmbeddingService(self._name(name, stored), model.tokenizer, model.encoder)
            loaded = LoadedEmbedder(service, {memory_name(plan.gpu): Bytes(plan.weights, plan.steps)})
            undo.pop_all()
        return loaded

    def _load_chat(
        self,
        name: str,
        stored: StoredModel,
        plan: MemoryPlan,
        options: LoadOptions,
        progress: Progress,
        parked: ParkedCache | None,
    ) -> LoadedChat:
        settings, renderer = self._settings_of(name), ChatTemplateRenderer()
        with ExitStack() as undo:
            undo.callback(renderer.close)
            renderer.start()  # starts in parallel with the load
            model = load_model(stored, settings, progress, options, parked)
            undo.callback(model.engine.close)
            service = self._chat_service(self._name(name, stored), model, renderer, settings)
            loaded = LoadedChat(model, service, renderer, settings, memory_name(plan.gpu))
            undo.pop_all()
        return loaded

    def _chat_service(
        self, name: str, model: ChatModel, renderer: ChatTemplateRenderer, settings: Settings
    ) -> ChatService:
        uses_recommended = settings.sampling_defaults != "none"
        return ChatService(
            name,
            model.tokenizer,
            TokenStreams(model.engine),
            renderer,
            self._replies,
            self.recent,
            sampling=DefaultSampling(model.sampling.values) if uses_recommended else API_DEFAULTS,
            generic_tools=settings.generic_tools,
            refuses_attachments=settings.images == "refuse",
        )

    def _name(self, name: str, stored: StoredModel) -> str:
        return self._names.get(name) or stored.served_name

    def describe(self, name: str) -> ModelFacts:
        """Read the files of a model. Raises ModelNotFound, ModelFileError, OutOfMemory, or TemplateUnavailable."""
        with converting_load_errors(name):
            return self._describe(name)

    def _describe(self, name: str) -> ModelFacts:
        stored, settings = self.stored(name), self._settings_of(name)
        details = details_of(stored, self._store.catalog, self._store.hub_models, self._describing)
        if is_embedding_model(stored):
            return ModelFacts(details, "embedding", details.context_length or 0)
        with open_checkpoint(stored.path, settings.quantize_method) as checkpoint:
            caches = fit(checkpoint, chat_options(settings)).caches
        return ModelFacts(details, "chat", caches[0].context if caches else 0)

    def close(self) -> None:
        self._describing.close()
