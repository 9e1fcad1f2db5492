"""A report as a table for people: cells of text, and the lines below them."""

from app.bench.report import Report, Standing
from app.bench.sample import Percentiles, Spread
from app.bench.workload import counted

Cell = tuple[str, str]  # title and figure

_UNKNOWN = "-"


def table(report: Report) -> list[Cell]:
    """Titles and figures; the first line has the name of the column."""
    *figures, memory = column(report.own, report)
    weights = [] if report.weight_gb_s is None else [("weights read", f"{spread_text(report.weight_gb_s)} GB/s")]
    return [("", report.own.name), *figures, *weights, memory]


def column(standing: Standing, report: Report) -> list[Cell]:
    """Figures of one competitor, for the rows of a report. Peak memory is the last."""
    cells = [(row.title, spread_text(standing.figures[row.name], " tok/s")) for row in report.rows]
    if report.load is not None:
        cells.append(("time to first token", _percentiles(standing.latencies.ttft_ms)))
        cells.append(("time between tokens", _percentiles(standing.latencies.itl_ms)))
    return [*cells, ("peak memory", _megabytes(standing.peak_rss_mb))]


def conditions(report: Report) -> list[str]:
    """Describe what the table shows, one sentence per line."""
    told, load = report.conditions, report.load
    way = "over HTTP" if told.via == "http" else "without HTTP"
    processor = told.processor or told.device
    what = "" if load is None else f", {load}"
    return [
        f"{told.model}{what}, {way}, on {counted(told.threads, 'thread')} of {processor}.",
        f"Each figure: the median of {told.repeat} runs (the smallest to the largest).",
        f"{report.own.name}: {report.own.build}",
    ]


def spread_text(spread: Spread | None, unit: str = "") -> str:
    if spread is None:
        return _UNKNOWN
    return f"{_number(spread.median)}{unit} ({_number(spread.low)}-{_number(spread.high)})"


def _percentiles(percentiles: Percentiles | None) -> str:
    if percentiles is None:
        return _UNKNOWN
    return f"{_number(percentiles.p50)} ms (p99 {_number(percentiles.p99)})"


def _megabytes(amount: float | None) -> str:
    return _UNKNOWN if amount is None else f"{_number(amount)} MB"


def _number(value: float) -> str:
    """Three digits that mean something."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
