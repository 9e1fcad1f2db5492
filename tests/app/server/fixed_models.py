"""Models of a test server that are loaded already, from services that a test has made."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from app.errors import ModelNotFound
from app.generation.embedding_service import EmbeddingService
from app.generation.recent_replies import RecentReplies
from app.generation.service import ChatService
from app.models.details import ModelDetails, ModelFacts
from app.models.residency.advice import Advice
from app.models.residency.ledger import HOST, Bytes
from app.models.residency.resident import LoadTask, Needs, Suspended
from app.models.residency.residents import Residents
from app.server.model_names import GivenModel, ModelNames
from app.server.served_models import LoadedModel, ServedModels
from engine.kv.parked_cache import ParkedCache


@dataclass
class FixedModel:
    """A loaded model with a service whose engine the test runs."""

    service: ChatService | EmbeddingService
    weight_bytes: int = 0
    needs_restart: bool = True

    async def start(self) -> None:
        """Do nothing: the test starts the engine."""

    def memories(self) -> Mapping[str, Bytes]:
        return {HOST: Bytes(weights=self.weight_bytes)}

    @property
    def is_running(self) -> bool:
        return False

    @property
    def failure(self) -> str:
        return self.service.failure

    def can_suspend(self, uses: int) -> bool:
        return False

    async def suspend(self) -> tuple[Suspended, ParkedCache | None]:
        raise NotImplementedError

    def resume(self, suspended: Suspended) -> None:
        raise NotImplementedError

    async def close(self, *, parks: bool) -> ParkedCache | None:
        await self.service.stop()
        return None


class NoLoader:
    """Finds no model to load."""

    def needs(self, name: str) -> Needs:
        raise ModelNotFound(f"{name} is not on this machine")

    def remedy(self, name: str) -> str:
        return "Choose a smaller model."

    def together(self, names: tuple[str, str], available: Mapping[str, int]) -> Advice:
        raise ModelNotFound(f"{names[0]} is not on this machine")

    def available(self) -> Mapping[str, int]:
        return {}

    def capacity(self) -> Mapping[str, int]:
        return {}

    def process_memory(self) -> Mapping[str, int]:
        return {}

    def load(self, name: str, allotted: Mapping[str, int], task: LoadTask, parked: ParkedCache | None) -> FixedModel:
        raise ModelNotFound(f"{name} is not on this machine")


def fixed_models(
    service: ChatService | EmbeddingService,
    aliases: Mapping[str, str] | None = None,
    describe: Callable[[], ModelDetails] | None = None,
) -> ServedModels:
    """Return the models of a server with one service, which is also the default model."""
    residents: Residents[LoadedModel] = Residents(NoLoader())
    residents.adopt(service.name, FixedModel(service))
    names = ModelNames([GivenModel(service.name, (service.name,))], aliases)
    facts = None if describe is None else lambda key: ModelFacts(describe())
    return ServedModels(
        residents, names, facts, recent=service.recent if isinstance(service, ChatService) else RecentReplies()
    )
