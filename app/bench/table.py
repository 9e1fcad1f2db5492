"""Formats a report as a text table, with lines about its conditions below."""

from app.bench.report import CompetitorResult, Report
from app.bench.sample import Percentiles, Spread
from app.bench.workload import counted

Cell = tuple[str, str]  # title and figure of one line

_UNKNOWN = "-"


def table(report: Report) -> list[Cell]:
    """Return the titles and figures of the table. The first line is the heading of the column."""
    *figures, memory = column(report.own, report)
    weights = [] if report.weight_gb_s is None else [("weights read", f"{spread_text(report.weight_gb_s)} GB/s")]
    return [("", report.own.name), *figures, *weights, memory]


def column(result: CompetitorResult, report: Report) -> list[Cell]:
    """Return the figures of one competitor for the rows of a report. Peak memory is the last one."""
    cells = [(row.title, spread_text(result.figures[row.name], " tok/s")) for row in report.rows]
    if report.load is not None:
        cells.append(("time to first token", _percentiles(result.latencies.ttft_ms)))
        cells.append(("time between tokens", _percentiles(result.latencies.itl_ms)))
    return [*cells, ("peak memory", _megabytes(result.peak_rss_mb))]


def conditions(report: Report) -> list[str]:
    """Return the conditions of the measurement, one sentence per line."""
    run, load = report.conditions, report.load
    via = "over HTTP" if run.via == "http" else "without HTTP"
    processor = run.processor or run.device
    workload = "" if load is None else f", {load}"
    return [
        f"{run.model}{workload}, {via}, on {counted(run.threads, 'thread')} of {processor}.",
        f"Each figure is the median of {run.repeat} runs, with the smallest and the largest in parentheses.",
        f"{report.own.name}: {report.own.build}",
    ]


def spread_text(spread: Spread | None, unit: str = "") -> str:
    if spread is None:
        return _UNKNOWN
    return f"{number_text(spread.median)}{unit} ({number_text(spread.low)}-{number_text(spread.high)})"


def _percentiles(percentiles: Percentiles | None) -> str:
    if percentiles is None:
        return _UNKNOWN
    return f"{number_text(percentiles.p50)} ms (p99 {number_text(percentiles.p99)})"


def _megabytes(amount: float | None) -> str:
    return _UNKNOWN if amount is None else f"{number_text(amount)} MB"


def number_text(value: float) -> str:
    """Return a number with three significant digits."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
