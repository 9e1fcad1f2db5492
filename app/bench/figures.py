"""The file of measured figures: its entries, how they are checked, and how an entry is replaced.

The file is one JSON object with a list of entries. `ingle bench --record` adds to it; `ingle bench --plot` draws it.
"""

import datetime
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from app.errors import AppError
from app.whole_file import write_whole

# XML cannot contain control characters, surrogates, U+FFFE, and U+FFFF.
Text = Annotated[str, Meta(pattern="^[^\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]+$", max_length=2000)]
Positive = Annotated[int, Meta(gt=0)] | Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(gt=0)]
_FIELD = re.compile(r"(?P<problem>.*?)(?: - at `\$\.?(?P<field>.*)`)?", re.DOTALL)


class BadFigures(AppError):
    """A file of figures does not exist, or one of its entries is malformed."""


class Machine(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The machine of a measurement."""

    processor: Text
    threads: Count
    memory_gb_s: tuple[Positive, Positive] | None = None  # lowest and highest read bandwidth of these threads, in GB/s


class Result(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The tokens per second of one engine: the median of the rounds, the lowest, and the highest."""

    engine: Text
    median: Positive
    low: Positive | None = None  # None: only the median is known
    high: Positive | None = None

    def __post_init__(self) -> None:
        low, high = self.low or self.median, self.high or self.median
        if (self.low is None) != (self.high is None) or not low <= self.median <= high:
            raise ValueError(f"low {self.low}, median {self.median}, and high {self.high} are not in ascending order")

    @property
    def top(self) -> float:
        return self.high or self.median


class Measure(Struct, frozen=True, forbid_unknown_fields=True):
    """One workload, such as "prefill, 512 tokens", and its results."""

    measure: Text
    results: Annotated[tuple[Result, ...], Meta(min_length=1)]


class Entry(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The figures that one command has measured."""

    chart: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,99}$")]  # name of the SVG file, without its suffix
    model: Text
    quantization: Text | None
    via: Literal["engine", "http"]
    machine: Machine
    date: datetime.date
    rounds: Count
    command: Text
    builds: dict[Text, Text]  # version, compiler, and instruction sets, by the name of the engine
    measures: Annotated[tuple[Measure, ...], Meta(min_length=1)]

    @property
    def key(self) -> tuple[Any, ...]:
        """The workloads and the machine. A new entry replaces an old one with the same key."""
        where = (self.machine.processor, self.machine.threads)
        measures = tuple(it.measure for it in self.measures)
        return self.chart, self.model, self.quantization, self.via, where, measures


def read_entries(path: Path) -> list[Entry]:
    """Read a file of figures. Raises BadFigures, which names the entry and the field, and OSError."""
    try:
        content = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError:
        remedy = "Name a file: ingle bench --plot FILE. ingle bench --record FILE writes one."
        raise BadFigures(f"There is no file of figures at {path}", remedy) from None
    except msgspec.DecodeError as problem:
        raise BadFigures(f"{path} is not valid JSON: {problem}", "Correct the file.") from None
    match content:
        case {"entries": [*entries]} if len(content) == 1:
            return [_entry(path, number, entry) for number, entry in enumerate(entries, 1)]
    raise BadFigures(f"{path} is not a file of figures", 'It needs one object with a list named "entries".')


def _entry(path: Path, number: int, content: object) -> Entry:
    try:
        return msgspec.convert(content, Entry)
    except msgspec.ValidationError as error:
        name = content.get("chart") if isinstance(content, dict) else None
        where = f"entry {number} ({name})" if isinstance(name, str) else f"entry {number}"
        found = _FIELD.fullmatch(str(error))
        field, problem = (found["field"], found["problem"]) if found is not None else (None, str(error))
        place = f"{where}: {field}" if field else where
        raise BadFigures(f"{path}, {place}: {problem}", "Correct this field, or remove the entry.") from None


def write_entries(path: Path, entries: Iterable[Entry]) -> None:
    """Write a file of figures. Raises OSError."""
    write_whole(path, msgspec.json.format(msgspec.json.encode({"entries": list(entries)}), indent=2) + b"\n")


def record(path: Path, entry: Entry) -> None:
    """Replace the entry with the same key, or append this one. Creates the file if there is none.

    Raises BadFigures if the file or the new entry is malformed, and OSError.
    """
    entries = {other.key: other for other in read_entries(path)} if path.exists() else {}
    _entry(path, len(entries) + 1, msgspec.to_builtins(entry))
    write_entries(path, {**entries, entry.key: entry}.values())
