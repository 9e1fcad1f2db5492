"""How the commands print what they list: aligned columns for people, JSON for scripts."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from app.store import StoredModel


def as_json(content: StoredModel | Sequence[StoredModel]) -> str:
    """A stored model as a JSON object, several as an array."""
    return json.dumps(
        asdict(content) if isinstance(content, StoredModel) else [asdict(item) for item in content],
        indent=2,
        default=str,
    )


def echo_table(rows: Sequence[Sequence[Any]]) -> None:
    """Print rows in aligned columns."""
    widths = [max(len(str(cell)) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
