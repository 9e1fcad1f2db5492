"""Turns a report into an entry of the file of figures, and adds it."""

import datetime
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from app.bench.competitor import OWN_NAME
from app.bench.figures import Entry, Machine, Measure, Result, read_entries, record
from app.bench.memory_speed import read_bandwidth
from app.bench.report import CompetitorResult, Report, rounded
from app.bench.sample import Spread
from app.bench.workload import Rate, Row

_TITLES = {OWN_NAME: "Inglenook"}


@dataclass(frozen=True, slots=True)
class Recording:
    """The file to which a measurement is added, and the names of its entry."""

    file: Path
    command: str  # repeats the measurement
    title: str | None = None  # title of the model; None: its name in the report
    chart: str | None = None  # name of the SVG file without its suffix; None: made from model and quantization

    def check(self) -> None:
        """Check the file before a measurement, which can take long. Raises BadFigures and OSError."""
        if self.file.exists():
            read_entries(self.file)

    def add(self, report: Report, peers: Sequence[CompetitorResult] = ()) -> None:
        """Measure the memory of this machine, and add a report with the peers of its rounds to the file.

        Raises BadFigures and OSError.
        """
        record(self.file, self.entry(report, peers, read_bandwidth(report.conditions.threads)))

    def entry(self, report: Report, peers: Sequence[CompetitorResult], memory_gb_s: tuple[float, float]) -> Entry:
        """Return the entry. `memory_gb_s`: lowest and highest read bandwidth of the threads."""
        run, results = report.conditions, [report.own, *peers]
        title = self.title or (Path(run.model).stem if run.model.endswith(".gguf") else run.model)
        via: Literal["engine", "http"] = "http" if run.via == "http" else "engine"
        names = [self.chart] if self.chart else [title, run.quantization, "http" if via == "http" else None]
        return Entry(
            chart=_file_name(names),
            model=title,
            quantization=run.quantization,
            via=via,
            machine=Machine(run.processor or run.device, run.threads, memory_gb_s),
            date=datetime.datetime.now(datetime.UTC).date(),
            rounds=run.repeat,
            command=self.command,
            builds={_title(result): result.build for result in results if result.build},
            measures=tuple(_measures(report, results)),
        )


def _measures(report: Report, results: Sequence[CompetitorResult]) -> list[Measure]:
    """Return the rates of prefill and decode that at least one engine reports.

    With one stream, two rows of a report are the same measure.
    """
    rows = {_measure_name(row, suite=report.load is None): row for row in report.rows if row.rate != Rate.END_TO_END}
    found = [(name, tuple(_results(row, results))) for name, row in rows.items()]
    return [Measure(name, figures) for name, figures in found if figures]


def _results(row: Row, results: Sequence[CompetitorResult]) -> list[Result]:
    figures = [(result, result.figures[row.name]) for result in results]
    return [_result(result, figure) for result, figure in figures if figure is not None]


def _result(result: CompetitorResult, figure: Spread) -> Result:
    median, low, high = map(rounded, (figure.median, figure.low, figure.high))
    return Result(_title(result), median, low, high)


def _title(result: CompetitorResult) -> str:
    return _TITLES.get(result.name, result.name)


def _measure_name(row: Row, *, suite: bool) -> str:
    """Return the name of a row with its sizes. Those of the suite have them in their titles."""
    if suite:
        return row.title
    if row.rate == Rate.PREFILL:
        return f"prefill, {row.load.prompt_tokens:,} tokens"
    streams = f"{row.load.streams} streams, " if row.load.streams > 1 else ""
    return f"decode, {streams}context {row.load.prompt_tokens:,}"


def _file_name(words: Sequence[str | None]) -> str:
    """Return the words as the name of a file, in lower case and with letters, digits, dots, and hyphens only."""
    name = "-".join(word for word in words if word)
    return re.sub(r"[^a-z0-9._]+", "-", name.lower()).strip("-._")[:100] or "chart"
