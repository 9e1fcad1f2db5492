"""The models of this process, and the rest of what the application needs, made from the settings."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.models.machine_memory import memory_limits
from app.models.pulls import Pulls
from app.models.residency.resident import Policy
from app.models.residency.residents import Residents
from app.models.sources import pull
from app.models.store import ModelStore
from app.models.stored_model import StoredModel
from app.progress import Progress
from app.settings.settings import Settings

if TYPE_CHECKING:
    from app.models.load.model_loader import ModelLoader
    from app.server.application import AccessPolicy, ServerContext
    from app.server.machine import Machine
    from app.server.model_names import GivenModel
    from app.server.served_models import ServedModels


@dataclass(frozen=True, slots=True)
class HostedModels:
    """The models of this process, none of which is loaded yet, and the rest of what an application needs."""

    default: StoredModel
    models: "ServedModels"
    pulls: Pulls
    context: "ServerContext"


@contextmanager
def hosted_models(settings: Settings, policy: "AccessPolicy", progress: Progress) -> Iterator[HostedModels]:
    """Download the models of the settings, and prepare to serve them and all stored ones until the context ends.

    Raises the errors of `pull`.
    """
    given = [pull(name, settings, progress) for name in (settings.model, *settings.more_models)]
    from app.models.load.model_loader import ModelLoader  # imports torch, which takes a second
    from app.server.application import ServerContext
    from app.server.boxes import Boxes

    store = ModelStore(settings)
    names = _given_models(given, settings)
    titles = {model.key: model.names[0] for model in names}
    with closing(ModelLoader(settings, store, {one.name: one for one in given}, titles, progress)) as loader:
        models, pulls = _served_models(loader, store, names, titles, settings), Pulls(settings, store)
        context = ServerContext(
            policy=policy,
            pulls=pulls,
            state_dir=settings.state_dir,
            boxes=Boxes(settings.state_dir),
            machine=_machine(settings),
            keep_changing_lines=settings.keep_changing_lines,
        )
        yield HostedModels(given[0], models, pulls, context)


def _given_models(given: Sequence[StoredModel], settings: Settings) -> "list[GivenModel]":
    """Return the models of the command line with their names. The first of them has the names of --alias."""
    from app.server.model_names import GivenModel

    default, *others = given
    names = tuple(settings.alias) or (default.served_name,)
    return [GivenModel(default.name, names), *(GivenModel(one.name, (one.served_name,)) for one in others)]


def _served_models(
    loader: "ModelLoader",
    store: ModelStore,
    given: "Sequence[GivenModel]",
    titles: Mapping[str, str],
    settings: Settings,
) -> "ServedModels":
    """Return the models of the server: the given ones with their titles, and all that are stored on this machine."""
    from app.server.model_names import ModelNames
    from app.server.served_models import ServedModels

    def known(name: str) -> str | None:
        found = store.find_known(name)
        return None if found is None else found.name

    def stored_names() -> list[str]:
        return [model.name for model in store.entries()]

    def policy(name: str) -> Policy:
        of_model = settings.of_model(name, titles.get(name, name))
        seconds = settings.idle_unload_s or None
        kept = seconds if of_model.keep_alive_s is None else of_model.keep_alive_s
        return Policy(titles.get(name, name), of_model.pin, kept)

    aliases = {alias: name for name, of_model in settings.models.items() for alias in of_model.aliases}
    return ServedModels(
        Residents(loader, policy, memory_limits(settings)),
        ModelNames(given, {**aliases, **settings.model_aliases}, known, stored_names),
        loader.describe,
        generic_tools=settings.generic_tools,
        uses_recommended=settings.sampling_defaults != "none",
        recent=loader.recent,
    )


def _machine(settings: Settings) -> "Machine":
    from app.models.load.kernel_preparation import common_options
    from app.server.machine import GpuMemory, Machine
    from engine.backends.device_choice import gpu_for

    gpu = gpu_for(common_options(settings))
    memory = None if gpu is None else GpuMemory(gpu.card.memory_bytes, gpu.free_memory, gpu.own_memory)
    limit = settings.kv_disk_limit
    return Machine(None if limit == 0 else settings.kv_disk_dir, limit, memory)
