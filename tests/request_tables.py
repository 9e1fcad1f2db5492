"""Every table of request fields, and the page that prints them: `python -m tests.request_tables` writes it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.server.dialects.anthropic.fields import TABLES as ANTHROPIC
from app.server.field_table import FieldTable, page

PAGE = Path(__file__).parents[1] / "docs" / "request-fields.md"

# By the method and path of the endpoint.
TABLES: Mapping[str, FieldTable[Any]] = {**ANTHROPIC}

if __name__ == "__main__":
    PAGE.write_text(page(TABLES), encoding="utf-8")
