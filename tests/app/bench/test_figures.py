"""The file of figures: errors that name the entry and the field, new and replaced entries, and the file of the tree."""

import json
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
import pytest

from app.bench.figures import BadFigures, Entry, Machine, Measure, Result, read_entries, record, write_entries

ROOT = Path(__file__).parents[3]
FIGURES = ROOT / "docs/figures/speed.json"
Change = Callable[[dict[str, Any]], object]


def entry(chart: str = "tiny-q4_1", *measures: Measure, model: str = "tiny", processor: str = "Abacus") -> Entry:
    """Return an entry; without measures, it has one with a range and one without."""
    prefill = Measure("prefill, 512 tokens", (Result("Inglenook", 400, 300, 500), Result("peer", 100, 80, 120)))
    decode = Measure("decode, context 128", (Result("Inglenook", 50), Result("peer", 12.5)))
    return Entry(
        chart=chart,
        model=model,
        quantization="Q4_1",
        via="engine",
        machine=Machine(processor, 2, (45, 60)),
        date=date(2026, 11, 29),
        rounds=3,
        command="ingle bench --suite",
        builds={"peer": "build 1"},
        measures=measures or (prefill, decode),
    )


@pytest.fixture
def figures(tmp_path: Path) -> Path:
    return tmp_path / "figures.json"


def test_entries_are_read_as_they_were_written(figures: Path) -> None:
    written = [entry(), entry("other")]
    write_entries(figures, written)
    assert read_entries(figures) == written


def of_result(**fields: object) -> Change:
    return lambda entry: entry["measures"][0]["results"][1].update(fields)


@pytest.mark.parametrize(
    ("change", "place", "problem"),
    [
        (of_result(median="fast"), "measures[0].results[1].median", "got `str`"),
        (of_result(median=0), "measures[0].results[1].median", ">= 1"),
        (of_result(median=200), "measures[0].results[1]", "not in ascending order"),
        (of_result(low=None), "measures[0].results[1]", "not in ascending order"),
        (of_result(engine="\x1b[2J"), "measures[0].results[1].engine", "matching regex"),
        (of_result(ratio=2), "measures[0].results[1]", "unknown field `ratio`"),
        (lambda entry: entry.update(measures=[]), "measures", "length >= 1"),
        (lambda entry: entry.update(chart="../page"), "chart", "matching regex"),
        (lambda entry: entry.update(date="yesterday"), "date", "date"),
        (lambda entry: entry["machine"].update(threads=0), "machine.threads", ">= 1"),
        (lambda entry: entry.pop("command"), "", "missing required field `command`"),
    ],
)
def test_malformed_entry_is_named_with_its_field(figures: Path, change: Change, place: str, problem: str) -> None:
    write_entries(figures, [entry("first"), entry("second")])
    content = json.loads(figures.read_bytes())
    change(content["entries"][1])
    figures.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(BadFigures) as raised:
        read_entries(figures)
    name = content["entries"][1]["chart"]
    assert raised.value.message.startswith(f"{figures}, entry 2 ({name}): {place}")
    assert problem in raised.value.message
    assert raised.value.remedy


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "not valid JSON"),
        ("[]", "not a file of figures"),
        ('{"entries": 1}', "not a file of figures"),
        ('{"entries": [], "more": 1}', "not a file of figures"),
        ('{"entries": [1]}', "entry 1: Expected `object`"),
    ],
)
def test_file_of_another_form_is_an_error(figures: Path, content: str, words: str) -> None:
    figures.write_text(content, encoding="utf-8")
    with pytest.raises(BadFigures, match=words):
        read_entries(figures)


def test_missing_file_is_an_error_that_names_the_option(figures: Path) -> None:
    with pytest.raises(BadFigures, match="no file of figures at") as raised:
        read_entries(figures)
    assert "ingle bench --plot FILE" in raised.value.remedy


def test_record_replaces_the_entry_with_the_same_key(figures: Path) -> None:
    first, second = entry("first"), entry("second")
    for new in (first, second):
        record(figures, new)
    faster = msgspec.structs.replace(first, rounds=9, date=date(2027, 1, 1))
    record(figures, faster)
    assert read_entries(figures) == [faster, second]


def test_record_appends_other_workloads_models_and_machines(figures: Path) -> None:
    decode = Measure("decode, context 2,000", (Result("Inglenook", 5),))
    others = [entry(), entry(model="small"), entry(processor="Slide rule"), entry("tiny-q4_1", decode)]
    for new in others:
        record(figures, new)
    assert read_entries(figures) == others


def test_record_refuses_an_entry_that_could_not_be_read(figures: Path) -> None:
    record(figures, entry())
    before = figures.read_bytes()
    with pytest.raises(BadFigures, match="model: "):
        record(figures, entry(model="a\x00"))
    assert figures.read_bytes() == before


def test_file_of_the_tree_has_the_form_that_record_writes(figures: Path) -> None:
    write_entries(figures, read_entries(FIGURES))
    assert figures.read_bytes() == FIGURES.read_bytes()


def test_figures_of_the_tree_are_those_of_the_tables() -> None:
    rows = (ROOT / "BENCHMARKS.md").read_text(encoding="utf-8").replace(" to ", "-").splitlines()
    cells = [tuple(cell.strip() for cell in row.split("|")[2:-1]) for row in rows if row.startswith("|")]
    for found in read_entries(FIGURES):
        for measure in found.measures:
            written = {_cell(result) for result in measure.results}
            assert any(written <= set(row) for row in cells), (found.chart, measure)


def _cell(result: Result) -> str:
    spread = f" ({result.low:,}-{result.high:,})" if result.low is not None else ""
    return f"{result.median:,}{spread}"
