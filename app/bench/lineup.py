"""Who is measured: our engine or our server, and the peers that were asked for, each ready and idle."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from app.bench.contender import Contender, ContenderFailed, check_context
from app.bench.llama_build import LlamaBuild, probe
from app.bench.llama_tools import LlamaTools, tools_for
from app.bench.measured_model import MeasuredModel
from app.bench.servers import ingle_server, llama_server
from app.bench.workload import Load
from app.bench.xllamacpp import PACKAGE, TESTED_VERSION, installed, xllamacpp_engine, xllamacpp_server
from app.progress import Progress
from app.settings.settings import Settings


@dataclass(frozen=True, slots=True)
class Peers:
    """The programs to compare with, found and probed."""

    xllamacpp: bool
    llama: LlamaBuild | None


@dataclass(frozen=True, slots=True)
class Lineup:
    """Who is measured, ours first, and what is known of ours."""

    contenders: tuple[Contender, ...]
    backend: str
    threads: int


def find_peers(compare: bool, llama_server: Path | None, progress: Progress) -> Peers:
    """Raises ContenderFailed when there is nobody to compare with, or what should be a llama-server is none."""
    xllamacpp = compare and installed()
    if compare and not xllamacpp:
        missing = f"{PACKAGE} is not installed"
        remedy = f"pip install {PACKAGE}=={TESTED_VERSION}, or give a native llama.cpp with --llama-server."
        if llama_server is None:
            raise ContenderFailed(f"There is nobody to compare with: {missing}", remedy)
        progress.say(f"{missing}: only llama.cpp is compared. To add it: pip install {PACKAGE}=={TESTED_VERSION}")
    return Peers(xllamacpp, None if llama_server is None else probe(llama_server))


def line_up_engines(
    model: MeasuredModel,
    settings: Settings,
    loads: Sequence[Load],
    peers: Peers,
    progress: Progress,
    resources: ExitStack,
) -> Lineup:
    """Our engine in this process, and the peers' engines on as many threads. Raises UnsuitableLoad, ContenderFailed,
    and what `load_model` raises."""
    from app.bench.own_engine import OwnEngine
    from app.models.load.loaded_model import load_model

    if peers.llama is not None:
        for tool in tools_for(loads):
            peers.llama.tool(tool)
    # The user's cache on disk is neither filled with random prompts nor any help with them.
    engine = load_model(model.stored, replace(settings, kv_disk_gb=0), progress).engine
    own = OwnEngine(engine)
    for load in loads:
        own.check(load)
        if own.crowds_cache(load):
            progress.say(f"{load}: they do not fit the cache together, so that some will yield and start again.")
    threads = engine.config.threads
    contenders: list[Contender] = [own]
    if peers.xllamacpp:
        progress.say("Starting xllamacpp")
        contenders.append(resources.enter_context(xllamacpp_engine(model.path, threads, loads)))
    if peers.llama is not None:
        contenders.append(LlamaTools(peers.llama, model.path, threads))
    return Lineup(tuple(contenders), engine.config.backend, threads)


def line_up_servers(
    model: MeasuredModel,
    settings: Settings,
    loads: Sequence[Load],
    peers: Peers,
    progress: Progress,
    resources: ExitStack,
) -> Lineup:
    """Our server and the peers', on as many threads. Raises UnsuitableLoad and ContenderFailed."""
    context = min(filter(None, (settings.context, model.context_length)), default=0)
    for load in loads:
        check_context(load, context)
    threads = settings.threads or _all_cores()
    progress.say("Starting ingle serve")
    contenders = [resources.enter_context(ingle_server(model.path, settings, threads))]
    if peers.xllamacpp:
        progress.say("Starting xllamacpp")
        contenders.append(resources.enter_context(xllamacpp_server(model.path, threads, loads)))
    if peers.llama is not None:
        progress.say("Starting llama-server")
        contenders.append(resources.enter_context(llama_server(peers.llama, model.path, threads, loads)))
    return Lineup(tuple(contenders), settings.kernels, threads)


def _all_cores() -> int:
    from engine.backends.device_choice import physical_cores

    return physical_cores()
