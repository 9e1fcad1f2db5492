"""Formats the output of commands: aligned columns for people, JSON for scripts."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import click

from app.terminal_width import terminal_width

_GAP = "  "  # between two columns
_NARROWEST = 3  # characters of a shortened cell


def as_json(content: Any) -> str:
    """Return dataclasses, paths, and plain JSON values as indented JSON.

    It is plain ASCII, so that text of a model or a server cannot send control sequences to the terminal.
    """
    return json.dumps(content, indent=2, default=_plain)


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"no JSON for {type(value).__name__}")


def echo_table(rows: Sequence[Sequence[object]]) -> None:
    """Print rows in aligned columns."""
    _echo_lines(_aligned([list(map(str, row)) for row in rows]))


def echo_wide_table(rows: Sequence[Sequence[object]]) -> None:
    """Print rows in aligned columns that fit the terminal. The last column holds paths or other long names.

    If the rows are wider than the terminal, each cell of the last column has a line, and the widest of the other
    columns are shortened in the middle.
    """
    _echo_lines(fitted_lines(rows, terminal_width(sys.stdout)))


def fitted_lines(rows: Sequence[Sequence[object]], width: int | None) -> Sequence[str]:
    """Return the lines of `echo_wide_table` on a terminal with `width` columns; None: not a terminal."""
    cells = [list(map(str, row)) for row in rows]
    whole = _aligned(cells)
    if width is None or max(map(len, whole)) <= width:
        return whole
    first = [row[:-1] for row in cells]
    widths = _fitted_widths(_widths(first), width)
    shortened = [[_shortened(cell, most) for cell, most in zip(row, widths, strict=True)] for row in first]
    return [line for row, start in zip(cells, _aligned(shortened), strict=True) for line in (start, f"  {row[-1]}")]


def _aligned(rows: Sequence[Sequence[str]]) -> Sequence[str]:
    widths = _widths(rows)
    return [_GAP.join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def _fitted_widths(widths: Sequence[int], width: int) -> Sequence[int]:
    """Return the widths of columns in a row of `width` cells: the widest columns are reduced."""
    fitted = list(widths)
    excess = sum(widths) + len(_GAP) * (len(widths) - 1) - width
    for _ in range(min(excess, sum(widths) - _NARROWEST * len(widths))):
        fitted[fitted.index(max(fitted))] -= 1
    return fitted


def _shortened(cell: str, most: int) -> str:
    """Return a cell with at most `most` characters, without its middle if it is longer."""
    end = most // 2
    return cell if len(cell) <= most else f"{cell[: most - end - 1]}…{cell[-end:]}"


def _echo_lines(lines: Sequence[str]) -> None:
    for line in lines:
        click.echo(line)
