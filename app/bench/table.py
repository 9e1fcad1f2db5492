"""A report as a table for people: cells of text, and what stands below them."""

from collections.abc import Callable

from app.bench.report import Report, Standing
from app.bench.statistics import Percentiles, Spread
from app.bench.workload import Row, counted

Line = tuple[str, ...]

_UNKNOWN = "-"


def table(report: Report) -> list[Line]:
    """Lines of equal length; the first has the titles of the columns."""
    titles = [column for peer in report.peers for column in (peer.name, "ours/theirs")]
    lines = [("", report.own.name, *titles), *(_rate(report, row) for row in report.rows)]
    if report.load is not None:
        lines.append(_line("time to first token", report, lambda one: _percentiles(one.latencies.ttft_ms)))
        lines.append(_line("time between tokens", report, lambda one: _percentiles(one.latencies.itl_ms)))
    if report.weight_gb_s is not None:
        lines.append(("weights read", f"{_spread(report.weight_gb_s)} GB/s", *[""] * len(titles)))
    lines.append(_line("peak memory", report, lambda one: _megabytes(one.peak_rss_mb)))
    return lines


def conditions(report: Report) -> list[str]:
    """What the table is of, a sentence a line."""
    told, load = report.conditions, report.load
    way = "over HTTP" if told.via == "http" else "without HTTP"
    processor = told.processor or told.device
    what = "" if load is None else f", {load}"
    return [
        f"{told.model}{what}, {way}, on {counted(told.threads, 'thread')} of {processor}.",
        f"Each figure: the median of {told.repeat} runs (the smallest to the largest).",
        *(f"{one.name}: {one.build}" for one in (report.own, *report.peers)),
    ]


def _rate(report: Report, row: Row) -> Line:
    cells = [cell for peer in report.peers for cell in (peer.figures[row.name], peer.ratios[row.name])]
    unit = [" tok/s", *(unit for _ in report.peers for unit in (" tok/s", ""))]
    figures = [report.own.figures[row.name], *cells]
    return (row.title, *(_spread(figure, suffix) for figure, suffix in zip(figures, unit, strict=True)))


def _line(title: str, report: Report, cell: Callable[[Standing], str]) -> Line:
    """A line of what has no ratio."""
    return (title, cell(report.own), *(text for peer in report.peers for text in (cell(peer), "")))


def _spread(spread: Spread | None, unit: str = "") -> str:
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
