"""`ingle bench` without its command line: load the model, measure, and report."""

from collections.abc import Sequence
from dataclasses import dataclass

from app.bench.measured_model import MeasuredModel, read_model
from app.bench.own_competitor import OwnCompetitor, own_competitor
from app.bench.processes import processor_name
from app.bench.report import Conditions, Report, report_of
from app.bench.rounds import Rounds, Series
from app.bench.workload import Load, Row, loads_of
from app.models.sources import pull
from app.progress import Progress
from app.settings.settings import Settings

_DEVICE = "cpu"  # reported for every engine
_PEAK_VRAM_MB = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The loads to measure, and how to measure them."""

    rows: tuple[Row, ...]
    load: Load | None  # the load that the user requested; None: each row has its own load
    repeat: int
    http: bool


def benchmark(settings: Settings, plan: Plan, progress: Progress) -> Report:
    """Download the model if it is not stored, measure, and report. Raises AppError, EngineError, or ModelFileError."""
    model = read_model(pull(settings.model, settings, progress))
    loads = loads_of(plan.rows)
    with own_competitor(model, settings, loads, progress, http=plan.http) as measured:
        [series] = Rounds(model.vocab_size, progress.say).run([measured.competitor], loads, plan.repeat)
        for line in remarks([series]):
            progress.say(line)
        return own_report(plan, model, measured, series)


def own_report(plan: Plan, model: MeasuredModel, measured: OwnCompetitor, series: Series) -> Report:
    """Return the report about this program. Call it while the process of the competitor runs."""
    conditions = Conditions(
        model=model.stored.name,
        quantization=model.stored.quantization,
        device=_DEVICE,
        processor=processor_name(),
        backend=measured.backend,
        via="http" if plan.http else "engine",
        threads=measured.threads,
        repeat=plan.repeat,
    )
    return report_of(conditions, plan.rows, plan.load, series, model.weight_bytes, _PEAK_VRAM_MB)


def remarks(series: Sequence[Series]) -> list[str]:
    """Return a sentence for each load whose streams did not all decode at the same time."""
    found = []
    for one in series:
        for load, samples in one.samples.items():
            together = min(sample.together for sample in samples)
            if together < load.streams and load.output_tokens > 1:
                found.append(
                    f"{one.competitor.name}: {load}: at most {together} streams decoded at the same time, and the "
                    "figures count only those. Use longer replies."
                )
    return found
