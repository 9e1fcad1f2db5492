"""Whether a model fits this machine, by its files or by headers from the Hub; and which recommended model fits.

`engine.fit` computes the numbers. Importing this module loads torch.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from app.errors import AppError, ModelNotFound
from app.models.hub_listing import list_repository
from app.models.load.kernel_preparation import common_options
from app.models.machine_memory import is_likely_to_fit, machine_memory, resident_bytes
from app.models.remote_headers import choices_of, remote_headers
from app.models.repository import RepositoryName
from app.models.store import ModelStore
from app.models.stored_model import StoredModel
from app.progress import Progress, SilentProgress, format_bytes
from app.settings.settings import Settings
from engine.checkpoints.checkpoint import Checkpoint
from engine.errors import OutOfMemory
from engine.fit import Fit, fit
from engine.load_options import LoadOptions
from engine.loading import open_checkpoint

_CPU = "cpu"
# Of weights, which a CPU reads once for each token: with 30 GB/s or more, as desktops have, words come as fast as
# people read them.
_FLUENT_BYTES = 3_000_000_000
_TOLERANCE = 0.03  # of what was planned
_NOISE = 64 << 20  # bytes that compiled kernels and what Python keeps for later come to
_INT4_SHARE = 0.3  # of weights of 16 bits: their scales and what stays as it is come on top of a quarter


@dataclass(frozen=True, slots=True)
class ModelFit:
    """A model, what it takes here, and what else there is to choose."""

    name: str
    size: int  # bytes of its files
    is_stored: bool
    fit: Fit  # on the device that is used first
    on_cpu: Fit | None  # where that is a GPU
    smaller: str  # the name of the largest smaller quantization that fits; empty: none is known
    int4: bool  # whether it would fit with its layers quantized to four bits while it loads

    @property
    def is_possible(self) -> bool:
        return self.fit.is_possible


def fit_model(name: str, settings: Settings, progress: Progress | None = None, memory: int = 0) -> ModelFit:
    """What the model of that name takes, fetching nothing but headers. `memory`: bytes of the device, had it so many.

    Raises ModelNotFound, Offline, ModelFileError, UnsupportedModel and what else opening a model does.
    """
    progress = progress or SilentProgress()
    store = ModelStore(settings)
    try:
        stored = store.resolve(name, progress)
    except ModelNotFound:
        repository = store.source_repository(name)
        if repository is None or settings.offline:
            raise
        with remote_headers(repository, settings, progress) as remote:
            return _model_fit(str(remote.name), remote.path, remote.size, remote.choices, settings, memory)
    return fit_stored(stored, settings, progress, memory)


def fit_stored(stored: StoredModel, settings: Settings, progress: Progress | None = None, memory: int = 0) -> ModelFit:
    """The same of a stored model. The Hub is asked for others where this one does not fit."""
    found = _model_fit(stored.name, stored.path, stored.size, {}, settings, memory)
    name = RepositoryName.parse(stored.name)
    if found.is_possible or name is None or settings.offline:
        return replace(found, is_stored=True)
    with suppress(AppError):
        choices = choices_of(list_repository(name.repo, settings, progress or SilentProgress()))
        smaller = _smaller(stored.name, stored.size, choices, found.fit)
        return replace(found, is_stored=True, smaller=smaller)
    return replace(found, is_stored=True)


def _model_fit(
    name: str, path: Path, size: int, choices: Mapping[str, int], settings: Settings, memory: int
) -> ModelFit:
    options = replace(common_options(settings), kv_type=settings.kv_type)
    with open_checkpoint(path, settings.quantize_method) as checkpoint:
        first = fit(checkpoint, options, memory)
        on_gpu = first.device == "cuda"
        on_cpu = fit(checkpoint, on_the_cpu(options)) if on_gpu and not first.is_possible else None
    plain = path.is_dir() and settings.quantize_method is None and not first.is_possible
    return ModelFit(
        name=name,
        size=size,
        is_stored=False,
        fit=first,
        on_cpu=on_cpu,
        smaller="" if first.is_possible else _smaller(name, size, choices, first),
        int4=plain and _fits(first, _INT4_SHARE) and _can_be_quantized(path),
    )


def on_the_cpu(options: LoadOptions) -> LoadOptions:
    """The same, computed without a GPU."""
    return replace(options, device=_CPU, backend="auto", kv_type="auto", card=None)


def _smaller(name: str, size: int, choices: Mapping[str, int], found: Fit) -> str:
    """The largest of the quantizations that fits, by the bytes of its files."""
    repository = RepositoryName.parse(name)
    fitting = (kind for kind, its in choices.items() if its < size and _fits(found, its / size))
    kind = next(fitting, None) if repository else None
    return f"{repository.repo}:{kind}" if repository and kind else ""


def _fits(found: Fit, share: float) -> bool:
    """Whether the model would fit if its weights took that share of what they take."""
    return found.needed - found.needs.weights * (1 - share) < found.memory


def _can_be_quantized(path: Path) -> bool:
    with suppress(AppError), open_checkpoint(path) as checkpoint:
        return not isinstance(checkpoint.metadata.values.get("quantization_config"), dict)
    return False


# -- words


def verdict(found: ModelFit) -> str:
    """One line for people: whether it fits, how long its context may be, and what else would fit."""
    numbers = f"needs {format_bytes(found.fit.needed)}, {format_bytes(found.fit.memory)} free"
    if found.is_possible:
        contexts = _contexts(found.fit)
        return f"fits: {contexts}; {numbers}" if contexts else f"fits: {numbers}"
    return "; ".join([f"does not fit: {numbers}", *advice(found)])


def advice(found: ModelFit) -> Iterator[str]:
    """What to do about a model that does not fit."""
    if found.smaller:
        yield f"try {found.smaller}"
    if found.on_cpu and found.on_cpu.is_possible:
        yield "or the CPU: --device cpu" if found.smaller else "try the CPU: --device cpu"
    if found.int4:
        yield "try --quantize int4"


def _contexts(found: Fit) -> str:
    """The longest first, each with its type of keys and values."""
    caches = sorted(found.caches, key=lambda cache: -cache.context)
    if caches and all(cache.context == found.wanted for cache in caches):
        return f"{in_thousands(found.wanted)} context"
    parts = [f"{in_thousands(cache.context)} with {cache.kv_type.upper()}" for cache in caches]
    return ", ".join([f"{parts[0].replace(' with', ' context with')} KV", *parts[1:]]) if parts else ""


def in_thousands(tokens: int) -> str:
    """A length of context, as people call it."""
    return f"{tokens // 1000}k" if tokens >= 10_000 else str(tokens)


# -- what loading has taken


@contextmanager
def compare_with_plan(plan: Fit, name: str, progress: Progress) -> Iterator[None]:
    """Tell where the body, which loads the model in the host's memory, takes another amount of it than was planned."""
    before = resident_bytes()
    yield
    after = resident_bytes()
    planned = plan.needs.weights + (plan.caches[0].tables if plan.caches else 0)
    if before is None or after is None or plan.device == "cuda":
        return
    taken = after - before
    if abs(taken - planned) > max(_TOLERANCE * planned, _NOISE):
        progress.say(f"{name} takes {format_bytes(max(0, taken))} of memory; {format_bytes(planned)} were expected.")


def plan_loading(
    checkpoint: Checkpoint, options: LoadOptions, stored: StoredModel, settings: Settings, progress: Progress
) -> Fit:
    """What loading an open checkpoint will take, on the device that the engine will come to.

    Raises OutOfMemory, with what would fit, where there is no room for it: nothing was read then.
    """
    plan = fit(checkpoint, options)
    if not plan.has_room and plan.device == "cuda" and not options.asks_for_gpu:
        plan = fit(checkpoint, on_the_cpu(options))
    if plan.has_room:
        return plan
    found = fit_stored(stored, settings, progress)
    numbers = f"it needs {format_bytes(plan.needed)} of memory, and {format_bytes(plan.memory)} are free"
    remedy = "; ".join(advice(found)) or "Choose a smaller model, or close other programs."
    raise OutOfMemory(f"{stored.name} does not fit: {numbers}", remedy)


def recommended_fit(settings: Settings, progress: Progress | None = None) -> ModelFit:
    """The first of the recommended models that fits; where a CPU computes, the first that is fast enough, too.

    Raises ModelNotFound where none does, Offline, or AppError where the Hub refuses.
    """
    memory = machine_memory(settings)
    for known in ModelStore(settings).families.recommended:
        if is_likely_to_fit(known.usual_size, memory):  # so that no header is fetched in vain
            found = fit_model(known.name, settings, progress or SilentProgress())
            if found.is_possible and (found.fit.device == "cuda" or found.size <= _FLUENT_BYTES):
                return replace(found, name=known.name)
    raise ModelNotFound("no recommended model fits this machine", "All that are known: ingle ls --catalog.")
