"""Check whether a model fits this machine, by its files or by headers from the Hub. Find a recommended model that fits.

`engine.fit` computes the numbers. Importing this module imports torch.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from app.errors import AppError, ModelNotFound, Offline
from app.models.decode_rate import expected_speed, is_fluent, likely_rate, measured_rate
from app.models.hub_listing import list_repository
from app.models.load.kernel_preparation import chat_options, common_options
from app.models.machine_memory import is_likely_to_fit, machine_memory
from app.models.remote_headers import choices_of, remote_headers
from app.models.repository import RepositoryName
from app.models.store import ModelStore
from app.models.stored_model import StoredModel
from app.progress import Progress, SilentProgress, format_bytes
from app.settings.settings import Settings
from engine.checkpoints.checkpoint import Checkpoint
from engine.errors import OutOfMemory
from engine.fit import Fit, MemoryPlan, fit, plan_memory
from engine.load_options import LoadOptions
from engine.loading import open_checkpoint
from engine.system_memory import resident_bytes

log = logging.getLogger(__name__)

_CPU = "cpu"
_TOLERANCE = 0.03  # share of the planned bytes by which the actual memory may differ
_NOISE = 64 << 20  # bytes of compiled kernels and of memory that Python retains, which the plan does not include
_INT4_SHARE = 0.3  # size of int4 weights relative to 16 bits: a quarter, scales, and layers that are not quantized


@dataclass(frozen=True, slots=True)
class ModelFit:
    """A model, the memory that it needs here, and alternatives."""

    name: str
    size: int  # bytes of its files
    is_stored: bool
    fit: Fit  # memory needs on the preferred device
    on_cpu: Fit | None  # set if the preferred device is a GPU and the model does not fit there
    smaller: str  # name of the largest smaller quantization that fits; empty: none is known
    int4: bool  # whether it would fit with its layers quantized to int4 while loading

    @property
    def is_possible(self) -> bool:
        return self.fit.is_possible


def fit_model(name: str, settings: Settings, progress: Progress | None = None, memory: int = 0) -> ModelFit:
    """Return the memory needs of the model with that name. Only headers are downloaded.

    `memory`: device memory to assume, in bytes; 0: the free memory. Raises ModelNotFound, Offline, ModelFileError,
    UnsupportedModel, and the errors of `open_checkpoint`.
    """
    progress = progress or SilentProgress()
    store = ModelStore(settings)
    try:
        stored = store.resolve(name, progress)
    except ModelNotFound:
        repository = store.source_repository(name)
        if repository is None or settings.offline:
            raise
        try:
            with remote_headers(repository, settings, progress) as remote:
                return _model_fit(str(remote.name), remote.path, remote.size, remote.choices, settings, memory)
        except Offline as problem:
            known = store.families.models.get(name.lower())
            if known is None:
                raise
            estimate = f"By its number of weights, {known.name} takes about {format_bytes(known.usual_size)}."
            raise Offline(problem.message, f"{estimate} Check the network for exact numbers.") from None
    return fit_stored(stored, settings, progress, memory)


def fit_stored(stored: StoredModel, settings: Settings, progress: Progress | None = None, memory: int = 0) -> ModelFit:
    """Return the memory needs of a stored model. If it does not fit, asks the Hub for smaller quantizations."""
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
    """Return the same options for a CPU."""
    return replace(options, device=_CPU, backend="auto", kv_type="auto", card=None)


def _smaller(name: str, size: int, choices: Mapping[str, int], found: Fit) -> str:
    """Return the name of the largest quantization that fits, by the size of its files; empty if there is none."""
    repository = RepositoryName.parse(name)
    fitting = (kind for kind, its in choices.items() if its < size and _fits(found, its / size))
    kind = next(fitting, None) if repository else None
    return f"{repository.repo}:{kind}" if repository and kind else ""


def _fits(found: Fit, share: float) -> bool:
    """Whether the model would fit if its weights took only the fraction `share` of their size."""
    return found.needed - found.needs.weights * (1 - share) < found.memory


def _can_be_quantized(path: Path) -> bool:
    with suppress(AppError), open_checkpoint(path) as checkpoint:
        return not isinstance(checkpoint.metadata.values.get("quantization_config"), dict)
    return False


# -- text output


def verdict(found: ModelFit) -> str:
    """Return one line: whether the model fits, its longest context, and alternatives that would fit."""
    numbers = f"needs {format_bytes(found.fit.needed)}, {format_bytes(found.fit.memory)} free"
    if found.is_possible:
        contexts = _contexts(found.fit)
        return f"fits: {contexts}; {numbers}" if contexts else f"fits: {numbers}"
    return "; ".join([f"does not fit: {numbers}", *advice(found)])


def advice(found: ModelFit) -> Iterator[str]:
    """Yield suggestions for a model that does not fit."""
    if found.smaller:
        yield f"try {found.smaller}"
    if found.on_cpu and found.on_cpu.is_possible:
        yield "or --device cpu" if found.smaller else "try --device cpu"
    if found.int4:
        yield "try --quantize int4"


def _contexts(found: Fit) -> str:
    """Return the context lengths, the longest first, each with its KV type."""
    caches = sorted(found.caches, key=lambda cache: -cache.context)
    if caches and all(cache.context == found.wanted for cache in caches):
        return f"{in_thousands(found.wanted)} context"
    parts = [f"{in_thousands(cache.context)} with {cache.kv_type.upper()}" for cache in caches]
    return ", ".join([f"{parts[0].replace(' with', ' context with')} KV", *parts[1:]]) if parts else ""


def in_thousands(tokens: int) -> str:
    """Return a context length in thousands, such as "32k"."""
    return f"{tokens // 1000}k" if tokens >= 10_000 else f"{tokens:,}"


# -- planned and actual memory


@contextmanager
def compare_with_plan(plan: Fit, name: str) -> Iterator[None]:
    """Log a line if the body, which loads the model into host memory, takes more or less memory than planned.

    Its level is debug: the difference includes code that is compiled meanwhile, and users can do nothing about it.
    """
    before = resident_bytes()
    yield
    after = resident_bytes()
    planned = plan.needs.weights + (plan.caches[0].tables if plan.caches else 0)
    if before is None or after is None or plan.device == "cuda":
        return
    taken = after - before
    if abs(taken - planned) > max(_TOLERANCE * planned, _NOISE):
        log.debug("%s takes %s of memory, planned %s", name, format_bytes(max(0, taken)), format_bytes(planned))


def plan_loading(
    checkpoint: Checkpoint, options: LoadOptions, stored: StoredModel, settings: Settings, progress: Progress
) -> Fit:
    """Return the memory needs of loading an open checkpoint, on the device that the engine will choose.

    Raises OutOfMemory, with suggestions, if it does not fit. No weights have been read then.
    """
    plan = fit(checkpoint, options)
    if not plan.has_room and plan.device == "cuda" and not options.asks_for_gpu:
        plan = fit(checkpoint, on_the_cpu(options))
    if plan.has_room:
        return plan
    found = fit_stored(stored, settings, progress)
    numbers = f"it needs {format_bytes(plan.needed)} of memory, and {format_bytes(plan.memory)} is free"
    remedy = "; ".join(advice(found)) or "Choose a smaller model, or close other programs."
    raise OutOfMemory(f"{stored.name} does not fit: {numbers}", remedy)


def memory_plan(stored: StoredModel, settings: Settings) -> MemoryPlan:
    """Return the memory that loading a stored model would take. It does not include a draft model.

    Raises ModelFileError, UnsupportedModel, UnsupportedTier, or UnsupportedQuantization.
    """
    return memory_plans(stored, [settings])[0]


def memory_plans(stored: StoredModel, variants: Sequence[Settings]) -> list[MemoryPlan]:
    """Return what `memory_plan` returns, for several settings with the same `quantize`."""
    with open_checkpoint(stored.path, variants[0].quantize_method) as checkpoint:
        return [plan_memory(checkpoint, chat_options(settings)) for settings in variants]


def recommended_fit(settings: Settings, progress: Progress | None = None) -> ModelFit:
    """Return the first recommended model that fits and is not expected to be slow.

    Raises ModelNotFound if none fits, Offline, or AppError if the Hub refuses.
    """
    memory = machine_memory(settings)
    for known in ModelStore(settings).families.recommended:
        if is_likely_to_fit(known.usual_size, memory):  # avoids the download of headers of models that are too large
            found = fit_model(known.name, settings, progress or SilentProgress())
            if found.is_possible and is_fluent(_speed(found.fit, settings)):
                return replace(found, name=known.name)
    raise ModelNotFound("no recommended model fits this machine", "ingle ls --catalog lists all known models.")


def _speed(found: Fit, settings: Settings) -> float | None:
    """Return the expected decode speed in tokens per second. On a device without a measured rate, it is a guess."""
    rate = likely_rate(found.device, measured_rate(settings.state_dir, found.device))
    return expected_speed(rate, found.active_weights)
