"""A server whose models load on demand: hash models of several sizes, and an embedding model. A test can hold loads."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from app.errors import ModelNotFound
from app.generation.embedding_service import EmbeddingService
from app.generation.recent_replies import RecentReplies
from app.generation.service import ChatService
from app.generation.template import ChatTemplateRenderer
from app.generation.token_streams import SuspendedReplies, TokenStreams
from app.models.details import ModelDetails, ModelFacts
from app.models.residency.advice import Advice, Share
from app.models.residency.ledger import HOST, Bytes
from app.models.residency.resident import LoadTask, Needs, Suspended
from app.models.residency.residents import Residents
from app.server.application import AccessPolicy, ServerContext, create_application
from app.server.model_names import GivenModel, ModelNames
from app.server.served_models import LoadedModel, ServedModels
from app.text.encoder_tokenizer import from_json
from app.text.tokenizer import Tokenizer
from engine.kv.parked_cache import ParkedCache
from tests.app.server.dialects.openai.test_embeddings import DigestEmbedder
from tests.app.server.live_server import ControlledRunner, controlled_engine
from tests.app.server.served_application import ServedApplication
from tests.app.text.small_wordpiece import document

DIGEST = "digest"  # name of the embedding model
CONTEXT = 2048


@dataclass
class HashLoaded:
    """A loaded model with its size in bytes."""

    service: ChatService | EmbeddingService
    weight_bytes: int
    needs_restart: bool = False
    is_closed: bool = False

    async def start(self) -> None:
        if isinstance(self.service, ChatService):
            await self.service.streams.start()

    def memories(self) -> Mapping[str, Bytes]:
        return {HOST: Bytes(weights=self.weight_bytes)}

    @property
    def is_running(self) -> bool:
        return isinstance(self.service, ChatService) and bool(self.service.streams.requests())

    @property
    def failure(self) -> str:
        return self.service.failure

    def can_suspend(self, uses: int) -> bool:
        return isinstance(self.service, ChatService) and self.service.streams.can_suspend(uses)

    async def suspend(self) -> tuple[Suspended, ParkedCache | None]:
        assert isinstance(self.service, ChatService)
        await self.service.suspend()
        self.is_closed = True
        return SuspendedReplies(self.service.streams), None

    def resume(self, suspended: Suspended) -> None:
        assert isinstance(suspended, SuspendedReplies)
        assert isinstance(self.service, ChatService)
        self.service.streams.resume(suspended.streams)

    async def close(self, *, parks: bool) -> ParkedCache | None:
        await self.service.stop()
        self.is_closed = True
        return None


class HashLoader:
    """Loads hash models with given sizes on a machine with `memory` bytes. `errors` are raised by the next loads."""

    def __init__(
        self, tokenizer: Tokenizer, renderer: ChatTemplateRenderer, memory: int, sizes: Mapping[str, int]
    ) -> None:
        self.sizes = dict(sizes)
        self.path = Path(__file__)  # of all models
        self.errors: dict[str, Exception] = {}
        self.loads: list[str] = []
        self.runners: dict[str, ControlledRunner] = {}  # the runner of the last load of each model
        self.recent = RecentReplies()
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._memory = memory
        self._loaded: list[HashLoaded] = []
        self._may_load = threading.Event()
        self._may_load.set()
        self.parts = 0  # parts of a held load that are done, of 10

    @contextmanager
    def held(self) -> Iterator[None]:
        """Make loads wait while the body runs."""
        self.parts = 0
        self._may_load.clear()
        try:
            yield
        finally:
            self.release()

    def release(self) -> None:
        self._may_load.set()

    def describe(self, name: str) -> ModelFacts:
        details = replace(ModelDetails.unknown(name), path=self.path, size=self.sizes[name])
        return ModelFacts(details, "embedding" if name == DIGEST else "chat", CONTEXT)

    def known(self, name: str) -> str | None:
        return name if name in self.sizes else None

    def needs(self, name: str) -> Needs:
        if name not in self.sizes:
            raise ModelNotFound(f"{name} is not on this machine")
        return Needs({HOST: self.sizes[name]})

    def remedy(self, name: str) -> str:
        return "Choose a smaller model."

    def together(self, names: tuple[str, str], available: Mapping[str, int]) -> Advice:
        first, second = (self.sizes[name] for name in names)
        return Advice({HOST: Share((first, second), available[HOST])}, "Both fit with a shorter context.")

    def available(self) -> Mapping[str, int]:
        return {HOST: self._memory - sum(one.weight_bytes for one in self._loaded if not one.is_closed)}

    def capacity(self) -> Mapping[str, int]:
        return {HOST: self._memory}

    def process_memory(self) -> Mapping[str, int]:
        return {}

    def load(self, name: str, allotted: Mapping[str, int], task: LoadTask, parked: ParkedCache | None) -> HashLoaded:
        self.loads.append(name)
        task.stage, task.total = f"Loading /some folder/{name}", 10
        while not self._may_load.wait(0.002):
            task.done = self.parts
            task.check()
        if (error := self.errors.pop(name, None)) is not None:
            raise error
        loaded = HashLoaded(self._service(name), self.sizes[name])
        self._loaded.append(loaded)
        return loaded

    def _service(self, name: str) -> ChatService | EmbeddingService:
        if name == DIGEST:
            return EmbeddingService(name, from_json(document()), DigestEmbedder())
        engine, self.runners[name] = controlled_engine(self._tokenizer.vocab_size, context=CONTEXT)
        return ChatService(name, self._tokenizer, TokenStreams(engine), self._renderer, recent=self.recent)


class LoadingServer(ServedApplication):
    """Serves the models "a" (the default), "b", and "digest", of which any two fit. None is loaded at the start."""

    def __init__(self, tokenizer: Tokenizer, renderer: ChatTemplateRenderer, memory: int = 100) -> None:
        self.loader = HashLoader(tokenizer, renderer, memory, {"a": 50, "b": 40, DIGEST: 10 + memory // 4})
        self.residents: Residents[LoadedModel] = Residents(self.loader)
        names = ModelNames(
            [GivenModel("a", ("a",))], {"alias": "b"}, self.loader.known, lambda: list(self.loader.sizes)
        )
        self.models = ServedModels(self.residents, names, self.loader.describe, recent=self.loader.recent)
        policy = AccessPolicy(host_names=["ingle.test"])
        super().__init__(create_application(self.models, ServerContext(policy)))

    def stop(self) -> None:
        """Close the models before the server waits for its connections, as a real one does. This ends their events."""
        if not self.residents.is_closed:
            self.call(self.residents.close())
        super().stop()
