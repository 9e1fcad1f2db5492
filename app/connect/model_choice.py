"""The model for a client: the loaded one if it can do the job, then the default one, then the largest that fits."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.connect.connection import Client
from app.errors import AppError, ModelNotFound
from app.settings.settings import Settings
from quant.errors import InglenookError, ModelFileError

if TYPE_CHECKING:
    from app.client.own_server import ServerModel
    from app.models.store import ModelStore
    from app.models.stored_model import StoredModel

NATIVE = "native"  # how a server describes a model whose chat template supports tools


class NoSuitableModel(ModelNotFound):
    """No model of this machine can do the job of a client."""


class ContextTooShort(AppError):
    """The first prompt of a client does not fit the context."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model that could be used."""

    name: str  # in requests
    has_tools: bool  # whether its chat template supports tools
    context_length: int  # in tokens: of the loaded model, or the longest that the model supports
    file: str | None = None  # the path that --model needs if it is not the name

    @property
    def option(self) -> str:
        """The value of --model that serves it."""
        return self.file or self.name


def shortcomings(client: Client, candidate: Candidate) -> Sequence[str]:
    """Return why a model does not suit a client; empty if it does."""
    found = []
    if client.needs_tools and not candidate.has_tools:
        found.append(f"the chat template of {candidate.name} has no tools, which {client.title} needs")
    if candidate.context_length < client.least_context:
        found.append(
            f"{candidate.name} has a context of {candidate.context_length:,} tokens, and the first prompt of "
            f"{client.title} needs {client.least_context:,}"
        )
    return found


def choose(client: Client, candidates: Iterable[Candidate], settings: Settings) -> Candidate:
    """Return the first suitable candidate.

    Raises NoSuitableModel, which states why the first one does not suit, and names a model to download.
    """
    problem = "there are no models"
    for number, one in enumerate(candidates):
        found = shortcomings(client, one)
        if not found:
            return one
        if number == 0:
            problem = found[0]
    raise NoSuitableModel(
        f"no model for {client.title} is stored: {problem}",
        f"ingle pull {_recommended(settings)}, or choose a model with --model.",
    )


def of_server(models: Sequence["ServerModel"]) -> Iterator[Candidate]:
    """Yield the models of a server that generate text. The first of `models` is its default model."""
    usable = [one for one in models if one.kind == "chat" and one.problem is None]
    default = usable[0].name if usable else ""
    for one in sorted(usable, key=lambda one: (one.state != "loaded", one.name != default, -(one.size or 0))):
        yield Candidate(one.name, one.tools == NATIVE, one.context_length or 0)


def of_files(settings: Settings) -> Iterator[Candidate]:
    """Yield the stored models that are likely to fit, the default model first. Reads their headers one by one."""
    from app.models.machine_memory import is_likely_to_fit, machine_memory
    from app.models.store import ModelStore

    store, memory = ModelStore(settings), machine_memory(settings)
    fitting = [one for one in store.entries() if is_likely_to_fit(one.size, memory)]
    largest = sorted(fitting, key=lambda one: -one.size)
    default: list[StoredModel] = []
    with suppress(InglenookError, OSError):
        default = [store.resolve(settings.model)]
    for stored in [*default, *largest]:
        with suppress(ModelFileError, AppError, OSError):
            yield _candidate(stored, store)


def of_name(settings: Settings) -> Candidate:
    """Return the stored model that the settings name. Raises ModelNotFound and ModelFileError."""
    from app.models.store import ModelStore

    store = ModelStore(settings)
    return _candidate(store.resolve(settings.model), store)


def trained_context(settings: Settings) -> int | None:
    """Return the context length that the files of the model of the settings state; None: unknown, or not stored."""
    from app.models.model_header import read_header
    from app.models.store import ModelStore

    with suppress(InglenookError, OSError):
        return read_header(ModelStore(settings).resolve(settings.model)).context_length
    return None


def _candidate(stored: "StoredModel", store: "ModelStore") -> Candidate:
    from app.models.details import details_of

    details = details_of(stored, store.catalog, store.hub_models)
    has_tools = details.template is not None and details.template.tools
    file = None if stored.served_name == stored.name else str(stored.path.absolute())
    if details.problem:
        return Candidate(stored.served_name, has_tools=False, context_length=0, file=file)
    return Candidate(stored.served_name, has_tools, details.context_length or 0, file)


def _recommended(settings: Settings) -> str:
    """Return the name of a model that is likely to fit, without asking the network."""
    from app.models.machine_memory import is_likely_to_fit, machine_memory
    from app.models.store import ModelStore

    memory, known = machine_memory(settings), ModelStore(settings).families.recommended
    return next((one.name for one in known if is_likely_to_fit(one.usual_size, memory)), known[-1].name)
