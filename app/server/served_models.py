"""The models of a server, as its endpoints see them: their descriptions, and the service of a loaded model.

A request names a model. `chat` and `embedder` load it if it is not loaded, and keep it loaded until the response has
been sent.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeAlias, TypeVar

from starlette.requests import Request

from app.generation.embedding_service import EmbeddingService
from app.generation.generic_tools import ToolSupport
from app.generation.model_format import Capabilities
from app.generation.options import API_DEFAULTS, DefaultSampling
from app.generation.recent_replies import RecentReplies
from app.generation.service import ChatService
from app.models.details import Kind, ModelDetails, ModelFacts
from app.models.residency.ledger import Bytes
from app.models.residency.resident import Loaded, ModelBusy, Resident, State
from app.models.residency.residents import Residents
from app.server.http.errors import InvalidRequest
from app.server.http.holds import EarlyEvents, Wait, holds_of
from app.server.model_names import ModelNames
from app.server.origin import OriginFields, class_of
from app.server.refusals import NO_TEXT, NO_VECTORS, RANKS_ONLY, Refusal
from engine.errors import EngineError, OutOfMemory
from quant.errors import InglenookError

NO_WAIT = "x-ingle-wait"  # header with which a client asks not to wait for a load: 0

Service: TypeAlias = ChatService | EmbeddingService
ServiceT = TypeVar("ServiceT", bound=Service)


class LoadedModel(Loaded, Protocol):
    """A loaded model with the service that its requests use."""

    @property
    def service(self) -> Service: ...

    @property
    def weight_bytes(self) -> int:
        """Size of the weights that compute one token; 0: unknown."""
        ...


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """A model, loaded or not."""

    key: str
    names: Sequence[str]
    facts: ModelFacts
    resident: Resident[LoadedModel]
    sampling: DefaultSampling
    capabilities: Capabilities

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def details(self) -> ModelDetails:
        return self.facts.details

    @property
    def service(self) -> Service | None:
        """The service of the model; None: it is not loaded."""
        return None if self.resident.loaded is None else self.resident.loaded.service

    @property
    def kind(self) -> Kind:
        if self.service is None:
            return self.facts.kind
        return "chat" if isinstance(self.service, ChatService) else "embedding"

    @property
    def context_length(self) -> int:
        """Length of a prompt and its reply together, in tokens."""
        return self.facts.context_length if self.service is None else self.service.context_length

    @property
    def vocab_size(self) -> int:
        return self.details.vocab_size or 0 if self.service is None else self.service.vocab_size

    @property
    def chat_template(self) -> str:
        if isinstance(self.service, ChatService):
            return self.service.tokenizer.chat_template or ""
        return self.details.chat_template

    @property
    def is_loaded(self) -> bool:
        return self.resident.state is State.LOADED

    @property
    def memory(self) -> Mapping[str, Bytes]:
        """The bytes that the model may use of each memory."""
        return {} if self.resident.loaded is None else self.resident.loaded.memories()


@dataclass(frozen=True, slots=True)
class Served(Generic[ServiceT]):
    """The service of a loaded model for one request, and the model name in the reply."""

    service: ServiceT
    name: str
    key: str


@dataclass(slots=True)
class ServedModels:
    """The models of one server."""

    residents: Residents[LoadedModel]
    names: ModelNames
    describe_files: Callable[[str], ModelFacts] | None = None  # reads the files of a model; slow
    generic_tools: bool = True  # whether tools are described as text to models without a template for them
    uses_recommended: bool = True  # whether the values that a model recommends are the defaults of sampling
    recent: RecentReplies = field(default_factory=RecentReplies)  # replies of all models
    _facts: dict[str, asyncio.Task[ModelFacts]] = field(default_factory=dict)

    async def chat(
        self,
        request: Request,
        name: str | None,
        fields: OriginFields | None = None,
        *,
        streams: bool = False,
        events: EarlyEvents | None = None,
        keep_alive: float | None = None,
    ) -> Served[ChatService]:
        """Return the service of the model that a request names, which stays loaded until the response has been sent.

        `fields` are those that determine the class of the request. If the model is not loaded, the request waits for
        it; a client that `streams` gets the `events` meanwhile, by default pings. From this request on, the model is
        unloaded `keep_alive` seconds after its last use; below 0: when its memory is needed; None: as before. Raises
        InvalidRequest if there is no such model or if it generates no text, and the errors of its load.
        """
        found = await self.names.find(name)
        await self._check_kind(found.key, "chat", NO_TEXT)
        service = await self._held(request, found.key, keep_alive, fields, streams=streams, events=events)
        if not isinstance(service, ChatService):
            raise NO_TEXT.error()
        return Served(service, found.reply_name, found.key)

    async def embedder(
        self, request: Request, name: str | None, *, vectors: bool = False, keep_alive: float | None = None
    ) -> Served[EmbeddingService]:
        """Return the service of a model that returns vectors, or unless `vectors`, one that ranks documents. See
        `chat`.
        """
        found = await self.names.find(name)
        await self._check_kind(found.key, "embedding", NO_VECTORS)
        service = await self._held(request, found.key, keep_alive)
        if not isinstance(service, EmbeddingService):
            raise NO_VECTORS.error()
        if vectors and service.ranks:
            raise RANKS_ONLY.error()
        return Served(service, found.reply_name, found.key)

    async def _check_kind(self, key: str, kind: Kind, refusal: Refusal) -> None:
        """Raise InvalidRequest before a model of the wrong kind is loaded."""
        if self.residents.of(key).loaded is None and (await self._facts_of(key)).kind != kind:
            raise refusal.error()

    async def _held(
        self,
        request: Request,
        key: str,
        keep_alive: float | None,
        fields: OriginFields | None = None,
        *,
        streams: bool = False,
        events: EarlyEvents | None = None,
    ) -> Service:
        service, model = class_of(request, fields), self.residents.of(key)
        if model.loaded is None and request.query_params.get("autoload", "true") not in ("1", "true", ""):
            raise InvalidRequest(f"model: {model.title} is not loaded", "Leave out autoload.", parameter="model")
        use = self.residents.use(key, service, waits=request.headers.get(NO_WAIT) != "0", keep_alive=keep_alive)
        try:
            loaded = await holds_of(request).enter(use, lambda: _wait(model), streams=streams, events=events)
        except ModelBusy as error:
            raise _unavailable(error, error.seconds) from error
        except OutOfMemory as error:
            raise _unavailable(error, self.residents.retry_seconds(model)) from error
        return loaded.service

    async def load(self, name: str | None, *, pinned: bool | None = None, keep_alive: float | None = None) -> None:
        """Load the model with a name if it is not loaded.

        `pinned`: see `Resident`; None: unchanged. `keep_alive`: see `chat`.
        """
        key = (await self.names.find(name)).key
        try:
            await self.residents.load(key, pinned=pinned, keep_alive=keep_alive)
        except OutOfMemory as error:
            raise _unavailable(error, self.residents.retry_seconds(self.residents.of(key))) from error

    async def unload(self, name: str | None) -> bool:
        """Unload the model with a name once no request uses it. Returns whether it was loaded."""
        return await self.residents.unload((await self.names.find(name)).key)

    async def is_loaded(self, name: str) -> bool:
        """Whether the model with a name is loaded or loading. False if there is none."""
        try:
            found = await self.names.find(name)
        except InvalidRequest:
            return False
        return self.residents.of(found.key).state in (State.LOADED, State.LOADING, State.UNLOADING)

    # -- descriptions

    def seconds_left(self, model: ModelDescription) -> float | None:
        """Return the seconds until a model is unloaded if no request uses it; None: it stays loaded."""
        return self.residents.seconds_left(model.resident)

    async def describe(self, name: str | None) -> ModelDescription:
        """Describe the model with a name. Raises InvalidRequest if there is none, and the errors of `details_of`."""
        found = await self.names.find(name)
        names = (await self.names.listed()).get(found.key, (found.reply_name,))
        return await self._describe(found.key, names)

    async def descriptions(self) -> list[ModelDescription]:
        """Describe all models. A model whose files cannot be read is described by its name only."""
        listed = await self.names.listed()
        return list(await asyncio.gather(*(self._describe(key, names) for key, names in listed.items())))

    async def _describe(self, key: str, names: Sequence[str]) -> ModelDescription:
        resident = self.residents.of(key)
        try:
            facts = await self._facts_of(key)
        except (InglenookError, OSError):
            facts = ModelFacts(ModelDetails.unknown(key))
        sampling, capabilities, loaded = self._sampling(facts), self._capabilities(facts), resident.loaded
        if resident.state is State.LOADED and loaded is not None and isinstance(loaded.service, ChatService):
            sampling = loaded.service.sampling
            with suppress(EngineError):  # the model is being unloaded
                capabilities = await loaded.service.capabilities()
        return ModelDescription(key, names, facts, resident, sampling, capabilities)

    def _sampling(self, facts: ModelFacts) -> DefaultSampling:
        recommended = facts.details.sampling
        return DefaultSampling(recommended.values) if recommended and self.uses_recommended else API_DEFAULTS

    def _capabilities(self, facts: ModelFacts) -> Capabilities:
        """Return the capabilities of a model that is not loaded."""
        template = facts.details.template
        if template is None:
            return Capabilities(ToolSupport.NONE, thinking=False, insertion=facts.details.fills_in_the_middle)
        generic = ToolSupport.GENERIC if self.generic_tools else ToolSupport.NONE
        tools = ToolSupport.NATIVE if template.tools else generic
        return Capabilities(tools, template.thinking, facts.details.fills_in_the_middle)

    async def _facts_of(self, key: str) -> ModelFacts:
        """Read the files of a model, once. Raises the errors of `details_of`."""
        if self.describe_files is None:
            return ModelFacts(ModelDetails.unknown(key))
        task = self._facts.get(key)
        if task is None or (task.done() and task.exception() is not None):
            task = self._facts[key] = asyncio.create_task(asyncio.to_thread(self.describe_files, key))
        return await asyncio.shield(task)


def _unavailable(error: InglenookError, seconds: float) -> InvalidRequest:
    """Return the error for a client, with the seconds after which it should try again."""
    headers = {"retry-after": str(max(1, round(seconds)))}
    return InvalidRequest(error.message, error.remedy, status=503, headers=headers)


def _wait(model: Resident[LoadedModel]) -> Wait:
    """Return the progress of a request that waits for a model."""
    task = model.task
    if task is None or not task.total:
        return Wait(f"{model.state.value} {model.title}", 0.0)
    return Wait(f"{model.state.value} {model.title}, {100 * task.fraction:.0f} %", task.fraction)
