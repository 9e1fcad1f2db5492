"""A benchmark from its first line to its report: who takes part, the measuring, and what there is to say about it."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from app.bench.alternation import Alternation, Series
from app.bench.lineup import find_peers, line_up_engines, line_up_servers
from app.bench.measured_model import read_model
from app.bench.processes import processor_name
from app.bench.report import Conditions, Report, report_of
from app.bench.workload import Load, Row, loads_of
from app.models.sources import pull
from app.progress import Progress
from app.settings.settings import Settings

_DEVICE = "cpu"  # every backend of this version computes there
_PEAK_VRAM_MB = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be measured."""

    rows: tuple[Row, ...]
    load: Load | None  # the one that was asked for; None: each row has its own
    repeat: int
    compare: bool  # with xllamacpp
    llama_server: Path | None
    http: bool


def benchmark(settings: Settings, plan: Plan, progress: Progress) -> Report:
    """Fetch the model if need be, measure, and report. Raises AppError, EngineError or ModelFileError."""
    peers = find_peers(plan.compare, plan.llama_server, progress)
    model = read_model(pull(settings.model, settings, progress))
    loads = loads_of(plan.rows)
    with ExitStack() as resources:
        if plan.http:
            lineup = line_up_servers(model, settings, loads, peers, progress, resources)
        else:
            lineup = line_up_engines(model, settings, loads, peers, progress, resources)
        series = Alternation(lineup.contenders, model.vocab_size, progress.say).run(loads, plan.repeat)
        for line in _remarks(series):
            progress.say(line)
        told = Conditions(
            model=model.stored.name,
            device=_DEVICE,
            processor=processor_name(),
            backend=lineup.backend,
            via="http" if plan.http else "engine",
            threads=lineup.threads,
            repeat=plan.repeat,
        )
        return report_of(told, plan.rows, plan.load, series, model.weight_bytes, _PEAK_VRAM_MB)


def _remarks(series: Sequence[Series]) -> list[str]:
    """Where streams did not decode together as they should have."""
    remarks = []
    for one in series:
        for load, samples in one.samples.items():
            together = min(sample.together for sample in samples)
            if together < load.streams and load.output_tokens > 1:
                remarks.append(
                    f"{one.contender.name}: {load}: only {together} of them ever decoded together, which is what was "
                    "measured. Longer replies help."
                )
    return remarks
