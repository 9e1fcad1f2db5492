"""The report of a benchmark: the figures of this program, their conditions, and both as JSON."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from app.bench.processes import peak_rss_mb
from app.bench.rounds import Series
from app.bench.sample import Percentiles, Spread, percentiles, spread
from app.bench.workload import Load, Row

_DIGITS = 4  # number of significant digits

Figures = Mapping[str, Spread | None]  # figures by row name; None: not reported


@dataclass(frozen=True, slots=True)
class Conditions:
    """The conditions of a measurement."""

    model: str
    quantization: str | None  # None: unknown
    device: str
    processor: str
    backend: str  # kernels of the engine
    via: str  # "engine" or "http"
    threads: int
    repeat: int


@dataclass(frozen=True, slots=True)
class Latencies:
    """Latencies of all streams and rounds of one load, in milliseconds."""

    ttft_ms: Percentiles | None
    itl_ms: Percentiles | None


@dataclass(frozen=True, slots=True)
class CompetitorResult:
    """The results of one competitor."""

    name: str
    build: str
    figures: Figures
    latencies: Latencies
    peak_rss_mb: float | None
    busy_elsewhere: Spread | None  # number of cores that uninvolved programs used during the measurement

    def json(self) -> dict[str, Any]:
        """Return the medians, latencies, and memory as JSON."""
        memory = {"peak_rss_mb": _rounded(self.peak_rss_mb)}
        return {**_medians(self.figures), **_latencies(self.latencies), **memory}


@dataclass(frozen=True, slots=True)
class Report:
    conditions: Conditions
    rows: tuple[Row, ...]
    load: Load | None  # the load that the user requested; None: the suite, in which each row has its own load
    own: CompetitorResult
    weight_gb_s: Spread | None  # weight bytes that one decoding stream reads per second
    peak_vram_mb: float

    def json(self) -> dict[str, Any]:
        """Return the report as one JSON object. Scripts rely on its names."""
        own = self.own
        return {
            **asdict(self.conditions),
            "build": own.build,
            **self._workload(),
            **own.json(),
            "weight_gb_s": _median(self.weight_gb_s),
            "peak_vram_mb": _rounded(self.peak_vram_mb),
            "busy_elsewhere_cores": spread_json(own.busy_elsewhere),
            "spread": extremes_json({**own.figures, "weight_gb_s": self.weight_gb_s}),
        }

    def _workload(self) -> dict[str, Any]:
        if self.load is not None:
            return _shape(self.load)
        return {"workloads": {row.name: _shape(row.load) for row in self.rows}}


def report_of(
    conditions: Conditions,
    rows: tuple[Row, ...],
    load: Load | None,
    series: Series,
    weight_bytes: int,
    peak_vram_mb: float,
) -> Report:
    """Return the report of a series. Call it while the competitor runs: it reads the memory of its process."""
    own = result_of(series, rows, load)
    decode = own.figures.get("decode_tok_s")
    weights = None if decode is None else decode.times(weight_bytes / 1e9)
    return Report(conditions, rows, load, own, weights, peak_vram_mb)


def result_of(series: Series, rows: tuple[Row, ...], load: Load | None) -> CompetitorResult:
    """Return the results of one competitor. Call it while it runs: it reads the memory of its process."""
    competitor = series.competitor
    figures = {row.name: spread(series.rates(row.load, row.rate)) for row in rows}
    return CompetitorResult(
        competitor.name,
        competitor.build,
        figures,
        _measured_latencies(series, load),
        None if competitor.pid is None else peak_rss_mb(competitor.pid),
        spread(series.elsewhere),
    )


def _measured_latencies(series: Series, load: Load | None) -> Latencies:
    samples = [] if load is None else series.samples[load]
    first = [1000 * wait for sample in samples for wait in sample.first_token]
    between = [1000 * gap for sample in samples for gap in sample.between_tokens]
    return Latencies(percentiles(first), percentiles(between))


# -- JSON


def _shape(load: Load) -> dict[str, int]:
    return {"prompt_tokens": load.prompt_tokens, "output_tokens": load.output_tokens, "concurrency": load.streams}


def spread_json(values: Spread | None) -> dict[str, float | None] | None:
    return None if values is None else {name: _rounded(value) for name, value in asdict(values).items()}


def _medians(figures: Figures) -> dict[str, float | None]:
    return {name: _median(figure) for name, figure in figures.items()}


def extremes_json(figures: Figures) -> dict[str, list[float | None] | None]:
    """Return the smallest and the largest value of each figure, by row name."""
    return {
        name: None if figure is None else [_rounded(figure.low), _rounded(figure.high)]
        for name, figure in figures.items()
    }


def _latencies(latencies: Latencies) -> dict[str, Any]:
    return {
        name: None if found is None else {"p50": _rounded(found["p50"]), "p99": _rounded(found["p99"])}
        for name, found in asdict(latencies).items()
    }


def _median(figure: Spread | None) -> float | None:
    return None if figure is None else _rounded(figure.median)


def _rounded(value: float | None) -> float | None:
    return None if value is None else rounded(value)


def rounded(value: float) -> float:
    """Return a figure with the digits that a report has."""
    return float(f"{value:.{_DIGITS}g}")
