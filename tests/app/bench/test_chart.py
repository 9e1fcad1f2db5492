"""Charts: lengths of bars and ranges, texts, themes, and the SVG files of the tree."""

from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import msgspec
import pytest

from app.bench.chart import charts_of, write_charts
from app.bench.figures import Entry, Machine, Measure, Result
from tests.app.bench.test_figures import FIGURES, entry

SVG = "{http://www.w3.org/2000/svg}"
SWATCH = "11"


def parsed(svg: str) -> Element:
    return ElementTree.fromstring(svg)  # noqa: S314  # our own text


def drawn(*entries: Entry) -> Element:
    """Return the only chart of the entries."""
    [svg] = charts_of(entries).values()
    return parsed(svg)


def bars(chart: Element, series: str) -> list[float]:
    """Return the widths of the bars of one engine, from top to bottom."""
    boxes = [box for box in chart.iter(f"{SVG}rect") if box.get("class") == series]
    return [float(box.attrib["width"]) for box in boxes if box.get("width") != SWATCH]


def texts(chart: Element, kind: str) -> list[str]:
    return [text.text or "" for text in chart.iter(f"{SVG}text") if text.get("class") == kind]


def ranges(chart: Element) -> list[tuple[float, float]]:
    """Return the starts and the ends of all ranges."""
    paths = [path.attrib["d"] for path in chart.iter(f"{SVG}path") if path.get("class") == "range"]
    steps = [path[1:].partition("M")[0].partition(" ") for path in paths]
    return [(float(start), float(rest.partition("H")[2])) for start, _, rest in steps]


def test_svg_files_of_the_tree_are_current(tmp_path: Path) -> None:
    """`ingle bench --plot` writes them again."""
    paths = write_charts(FIGURES, tmp_path)
    assert {path.name for path in paths} == {path.name for path in FIGURES.parent.glob("*.svg")}
    for path in paths:
        assert path.read_bytes() == (FIGURES.parent / path.name).read_bytes(), path.name


def test_bars_are_proportional_to_the_medians() -> None:
    chart = drawn(entry())
    ours, theirs = bars(chart, "first"), bars(chart, "second")
    assert ours[0] / 400 == pytest.approx(theirs[0] / 100, rel=0.01)
    assert ours[0] / 400 == pytest.approx(ours[1] / 50, rel=0.01)
    assert theirs[1] == pytest.approx(12.5 * ours[0] / 400, abs=0.1)


def test_ranges_reach_from_the_lowest_to_the_highest() -> None:
    chart = drawn(entry())
    start = min(float(box.attrib["x"]) for box in chart.iter(f"{SVG}rect") if box.get("class") == "first"
                and box.get("width") != SWATCH)  # fmt: skip
    pixels = bars(chart, "first")[0] / 400
    for drawn_range, spread in zip(ranges(chart), [(300, 500), (80, 120)], strict=True):
        assert drawn_range == pytest.approx([start + value * pixels for value in spread], abs=0.2)


def test_entries_of_a_chart_have_one_scale() -> None:
    slow = entry("tiny-q4_1", Measure("prefill, 512 tokens", (Result("Inglenook", 4),)), processor="Slide rule")
    widths = bars(drawn(entry(), slow), "first")
    assert widths[-1] == pytest.approx(widths[0] / 100, abs=0.1)


def test_everything_is_inside_the_chart() -> None:
    long = Measure("decode, " + "very " * 50 + "long", (Result("x" * 60, 123456789, 1, 223456789),))
    chart = drawn(entry("tiny-q4_1", long, model="m" * 300, processor="p" * 300))
    _, _, width, height = map(float, chart.attrib["viewBox"].split())
    for text in chart.iter(f"{SVG}text"):
        start = float(text.attrib["x"])
        end = start + 6 * len(text.text or "") * (text.get("text-anchor") == "start")
        assert 0 < start <= end <= width, text.text
        assert 0 < float(text.attrib["y"]) < height
    for box in chart.iter(f"{SVG}rect"):
        assert float(box.attrib["x"]) + float(box.attrib["width"]) <= width


def test_long_legend_has_several_lines() -> None:
    engines = [f"an engine with a long name {number}" for number in range(3)]
    chart = drawn(entry("tiny", Measure("prefill, 512 tokens", tuple(Result(engine, 1) for engine in engines))))
    places = {text.text: (text.attrib["x"], float(text.attrib["y"])) for text in chart.iter(f"{SVG}text")}
    assert len({places[engine][0] for engine in engines}) == 1
    assert len({places[engine][1] for engine in engines}) == 3


def test_texts_are_escaped() -> None:
    name = """<b>&amp; "quoted" 'model'</b>"""
    [svg] = charts_of([entry(model=name)]).values()
    assert "<b>" not in svg
    assert texts(parsed(svg), "heading") == [f"{name}, Q4_1"]


def test_values_have_the_digits_of_the_file() -> None:
    measure = Measure("prefill, 512 tokens", (Result("Inglenook", 2718), Result("peer", 92), Result("other", 33.25)))
    assert texts(drawn(entry("tiny", measure)), "value") == ["2,718", "92", "33.2"]


def test_notes_describe_machine_date_and_rounds() -> None:
    assert texts(drawn(entry()), "quiet")[1:] == [
        "Abacus; 2 threads, which read 45 to 60 GB/s of memory",
        "2026-11-29; bars show the median of 3 rounds; lines show the lowest and the highest",
    ]
    plain = msgspec.structs.replace(entry(), machine=Machine("Abacus", 1), measures=entry().measures[1:], rounds=1)
    assert texts(drawn(plain), "quiet")[1:] == ["Abacus; 1 thread", "2026-11-29; bars show the median of 1 round"]


def test_heading_and_notes_are_shown_once_for_equal_entries() -> None:
    decode = Measure("decode, context 2,000", (Result("Inglenook", 5, 4, 6),))
    chart = drawn(entry(), entry("tiny-q4_1", decode), entry(model="small"))
    assert texts(chart, "heading") == ["tiny, Q4_1", "small, Q4_1"]
    assert len(texts(chart, "quiet")) == 3
    http = msgspec.structs.replace(entry(), via="http")
    assert texts(drawn(http), "heading") == ["tiny, Q4_1, over HTTP"]


def test_charts_have_both_themes_and_load_nothing() -> None:
    [svg] = charts_of([entry()]).values()
    style = next(parsed(svg).iter(f"{SVG}style")).text or ""
    light, _, dark = style.partition("@media (prefers-color-scheme:dark)")
    assert ".first{fill:#a4531c}" in light
    assert ".first{fill:#e0925a}" in dark
    assert not any(word in svg for word in ("<script", "href", "url(", "@import", "@font-face"))


def test_each_chart_name_becomes_a_file(tmp_path: Path) -> None:
    charts = charts_of([entry("one"), entry("two"), entry("one", model="small")])
    assert list(charts) == ["one", "two"]
