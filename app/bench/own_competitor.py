"""Inglenook as a competitor in a benchmark: its engine in this process, or its server."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from app.bench.competitor import Competitor, check_context
from app.bench.measured_model import MeasuredModel
from app.bench.workload import Load
from app.progress import Progress
from app.settings.settings import Settings


@dataclass(frozen=True, slots=True)
class OwnCompetitor:
    """Inglenook as a competitor, with facts for the report."""

    competitor: Competitor
    backend: str
    threads: int


@contextmanager
def own_competitor(
    model: MeasuredModel, settings: Settings, loads: Sequence[Load], progress: Progress, *, http: bool
) -> Iterator[OwnCompetitor]:
    """Yield the engine, or the server if `http` is set.

    Raises UnsuitableLoad, CompetitorFailed, and what `load_model` raises.
    """
    if http:
        with _server(model, settings, loads, progress) as served:
            yield served
    else:
        yield _engine(model, settings, loads, progress)


def _engine(model: MeasuredModel, settings: Settings, loads: Sequence[Load], progress: Progress) -> OwnCompetitor:
    from app.bench.own_engine import OwnEngine
    from app.models.load.loaded_model import load_model

    # Random prompts would fill the user's on-disk cache, and would never be found in it.
    engine = load_model(model.stored, replace(settings, kv_disk_gb=0), progress).engine
    competitor = OwnEngine(engine)
    for load in loads:
        competitor.check_load(load)
        if competitor.overflows_cache(load):
            progress.say(f"{load}: the streams do not fit the KV cache together, so some will be preempted.")
    return OwnCompetitor(competitor, engine.config.backend, engine.config.threads)


@contextmanager
def _server(
    model: MeasuredModel, settings: Settings, loads: Sequence[Load], progress: Progress
) -> Iterator[OwnCompetitor]:
    from app.bench.own_server import own_server

    context = min(filter(None, (settings.context, model.context_length)), default=0)
    for load in loads:
        check_context(load, context)
    threads = settings.threads or _all_cores()
    progress.say("Starting ingle serve")
    with own_server(model.path, settings, threads) as competitor:
        yield OwnCompetitor(competitor, settings.kernels, threads)


def _all_cores() -> int:
    from engine.backends.device_choice import physical_cores

    return physical_cores()
