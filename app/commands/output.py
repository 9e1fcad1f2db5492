"""Formats the output of commands: aligned columns for people, JSON for scripts."""

import json
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import click


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
    widths = [max(len(str(cell)) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
