"""Draws figures as SVG: grouped horizontal bars, each with the range of its rounds as a thin line.

All bars of a chart have one scale, which starts at 0. The colors are those of the chat's themes, light or dark as the
viewer prefers. Texts have the viewer's font, so their widths are estimates.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from app.bench.figures import Entry, Measure, Result, read_entries
from app.bench.table import number_text
from app.bench.workload import counted
from app.whole_file import write_whole

_WIDTH, _MARGIN = 760, 28
_BARS_START, _BARS_END = 248, 668  # the names of measures are on the left, and the last value on the right
_BAR, _BAR_STEP, _GROUP_GAP = 13, 16, 14
_SWATCH, _LEGEND_END = 11, 470
_CAP = 3  # half of the height of the ends of a range
_LETTER = 7  # estimated width of a letter of 13 px
_MOST_LETTERS: Mapping[str, int] = {"heading": 80, "name": 32, "value": 12, "quiet": 115}
_SERIES = ("first", "second", "third", "fourth")
_COLORS: Mapping[str, tuple[str, str]] = {  # declarations, each with a color in the light theme and in the dark one
    ".paper{fill:%s}": ("#fbf7f2", "#171412"),
    ".paper{stroke:%s}": ("#e0d4c7", "#3a322c"),
    ".heading,.name,.value{fill:%s}": ("#2b2320", "#e8e0d8"),
    ".quiet{fill:%s}": ("#615a57", "#a89f97"),
    ".axis{stroke:%s}": ("#bdb0a3", "#5a4f47"),
    ".range{stroke:%s}": ("#2b2320", "#fbf7f2"),
    ".first{fill:%s}": ("#a4531c", "#e0925a"),
    ".second{fill:%s}": ("#7fa6a8", "#4f7f82"),
    ".third{fill:%s}": ("#c9b8a5", "#75675c"),
    ".fourth{fill:%s}": ("#94b97c", "#5d7d49"),
}
_FONTS = """
text{font:13px system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif}
.heading{font-size:15px;font-weight:600}
.quiet{font-size:12px}
.value{font-variant-numeric:tabular-nums}
.range,.axis{fill:none}
"""


def write_charts(file: Path, folder: Path) -> list[Path]:
    """Draw the charts of a file of figures, and return the paths of the SVG files.

    Creates the folder if it does not exist. Raises BadFigures and OSError.
    """
    charts = charts_of(read_entries(file))
    folder.mkdir(parents=True, exist_ok=True)
    for name, svg in charts.items():
        write_whole(folder / f"{name}.svg", svg.encode())
    return [folder / f"{name}.svg" for name in charts]


def charts_of(entries: Iterable[Entry]) -> dict[str, str]:
    """Return the SVG texts of all charts by name. A chart has all entries that name it."""
    charts: dict[str, list[Entry]] = {}
    for entry in entries:
        charts.setdefault(entry.chart, []).append(entry)
    return {name: Chart(chosen).svg() for name, chosen in charts.items()}


class Chart:
    """One drawing. It grows downwards: `_y` is the end of the part that is drawn, in pixels."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = entries
        results = [result for entry in entries for measure in entry.measures for result in measure.results]
        engines = dict.fromkeys(result.engine for result in results)
        self._series = {engine: _SERIES[index % len(_SERIES)] for index, engine in enumerate(engines)}
        self._scale = (_BARS_END - _BARS_START) / max(result.top for result in results)  # pixels per token/s
        self._root = Element("svg", xmlns="http://www.w3.org/2000/svg", role="img")
        self._y = float(_MARGIN)

    def svg(self) -> str:
        """Return the text of the SVG file."""
        SubElement(self._root, "title").text = "; ".join(dict.fromkeys(map(_heading, self._entries)))
        SubElement(self._root, "style").text = _style()
        paper = SubElement(self._root, "rect", {"class": "paper", "x": "0.5", "y": "0.5", "rx": "10"})
        self._legend()
        for note, noted in groupby(self._entries, _note):
            for heading, panel in groupby(noted, _heading):
                self._panel(heading, [measure for entry in panel for measure in entry.measures])
            for line in note:
                self._text("quiet", _MARGIN, self._y + 4, line)
                self._y += 17
            self._y += 11
        height = round(self._y)
        paper.attrib |= {"width": str(_WIDTH - 1), "height": str(height - 1)}
        self._root.attrib |= {"viewBox": f"0 0 {_WIDTH} {height}", "width": str(_WIDTH), "height": str(height)}
        ElementTree.indent(self._root)
        return ElementTree.tostring(self._root, encoding="unicode") + "\n"

    def _legend(self) -> None:
        self._text("quiet", _WIDTH - _MARGIN, self._y + 1, "tokens per second; longer bars are faster", anchor="end")
        x = _MARGIN
        for engine, series in self._series.items():
            width = _SWATCH + 7 + _LETTER * min(len(engine), _MOST_LETTERS["name"])
            if x > _MARGIN and x + width > _LEGEND_END:
                x, self._y = _MARGIN, self._y + 20
            self._box(series, x, self._y - 9, _SWATCH, _SWATCH)
            self._text("name", x + _SWATCH + 7, self._y + 1, engine)
            x += width + 24
        self._y += 14

    def _panel(self, heading: str, measures: Sequence[Measure]) -> None:
        self._y += 22
        self._text("heading", _MARGIN, self._y + 4, heading)
        self._y += 20
        top = self._y
        for measure in measures:
            self._group(measure)
        self._path("axis", f"M{_BARS_START - 0.5} {_px(top - 4)}V{_px(self._y - _GROUP_GAP + 4)}")
        self._y += 10

    def _group(self, measure: Measure) -> None:
        middle = self._y + (_BAR_STEP * len(measure.results) - (_BAR_STEP - _BAR)) / 2
        self._text("name", _MARGIN, middle + 4.5, measure.measure)
        for result in measure.results:
            self._bar(result)
            self._y += _BAR_STEP
        self._y += _GROUP_GAP

    def _bar(self, result: Result) -> None:
        self._box(self._series[result.engine], _BARS_START, self._y, result.median * self._scale)
        middle = self._y + _BAR / 2
        if result.low is not None and result.high is not None:
            low, high = (_px(_BARS_START + value * self._scale) for value in (result.low, result.high))
            ends = "".join(f"M{end} {_px(middle - _CAP)}v{2 * _CAP}" for end in (low, high))
            self._path("range", f"M{low} {_px(middle)}H{high}{ends}")
        self._text("value", _BARS_START + result.top * self._scale + 8, middle + 4.5, _digits(result.median))

    def _box(self, series: str, x: float, y: float, width: float, height: float = _BAR) -> None:
        place = {"x": _px(x), "y": _px(y), "width": _px(width), "height": _px(height)}
        SubElement(self._root, "rect", {"class": series, **place})

    def _path(self, kind: str, steps: str) -> None:
        SubElement(self._root, "path", {"class": kind, "d": steps})

    def _text(self, kind: str, x: float, y: float, text: str, anchor: str = "start") -> None:
        attributes = {"class": kind, "x": _px(x), "y": _px(y), "text-anchor": anchor}
        most = _MOST_LETTERS[kind]
        SubElement(self._root, "text", attributes).text = text if len(text) <= most else text[: most - 1] + "…"


def _style() -> str:
    light, dark = ("\n".join(rule % colors[theme] for rule, colors in _COLORS.items()) for theme in (0, 1))
    return f"{_FONTS}{light}\n@media (prefers-color-scheme:dark){{\n{dark}\n}}\n"


def _heading(entry: Entry) -> str:
    via = "over HTTP" if entry.via == "http" else ""
    return ", ".join(part for part in (entry.model, entry.quantization, via) if part)


def _note(entry: Entry) -> tuple[str, str]:
    """Return the conditions of a measurement in two lines."""
    machine, ranges = entry.machine, any(it.low is not None for measure in entry.measures for it in measure.results)
    memory = "" if machine.memory_gb_s is None else f", which read {_between(machine.memory_gb_s)} GB/s of memory"
    lines = "; lines show the lowest and the highest" if ranges else ""
    return (
        f"{machine.processor}; {counted(machine.threads, 'thread')}{memory}",
        f"{entry.date}; bars show the median of {counted(entry.rounds, 'round')}{lines}",
    )


def _between(values: tuple[float, float]) -> str:
    low, high = map(_digits, values)
    return low if low == high else f"{low} to {high}"


def _digits(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else number_text(value)


def _px(length: float) -> str:
    return f"{length:.1f}".removesuffix(".0")
