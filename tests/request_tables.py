"""Write the page docs/request-fields.md from all tables of request fields: `python -m tests.request_tables`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from app.server.dialects import rerank
from app.server.dialects.anthropic import fields as anthropic_fields
from app.server.dialects.llama_cpp import fields as llama_cpp_fields
from app.server.dialects.lm_studio import fields as lm_studio_fields
from app.server.dialects.ollama import fields as ollama_fields
from app.server.dialects.openai import fields as openai_fields
from app.server.dialects.responses import fields as responses_fields
from app.server.request_fields import Field, FieldTable
from tests.support.markdown import contents_list

PAGE = Path(__file__).parents[1] / "docs" / "request-fields.md"

# The table of each endpoint, by its method and path.
TABLES: Mapping[str, FieldTable[Any]] = {
    **openai_fields.TABLES,
    **responses_fields.TABLES,
    **anthropic_fields.TABLES,
    **ollama_fields.TABLES,
    **llama_cpp_fields.TABLES,
    **lm_studio_fields.TABLES,
    **rerank.TABLES,
}

_PREFACE = """\
# Request fields

The documented fields of each request, and how Inglenook handles them. The server decodes requests by these tables, and
a test checks each row. Undocumented fields are ignored. The second column names the APIs that document the field. The
third column is one of:

- **supported**: the field works as its documents describe.
- **alias**: another name of the named field.
- **ignored**: the field cannot change a reply here.
- **refused**: the request fails with status 400 and the field's name. Null and the accepted values in the last column
  are allowed.

Contents:
"""


def page(tables: Mapping[str, FieldTable[Any]]) -> str:
    """Return the page as Markdown. Each endpoint has a section with its table."""
    lines = [_PREFACE, *contents_list(list(tables))]
    for endpoint, table in tables.items():
        lines += ["", f"## {endpoint}", "", "| field | documented by | here | notes |", "|---|---|---|---|"]
        lines += [_row(field) for field in sorted(table.fields, key=lambda it: it.path)]
    return "\n".join(lines) + "\n"


def _row(field: Field) -> str:
    handling = f"alias of `{field.target}`" if field.target else field.handling.value
    accepted = ", ".join(f"`{msgspec.json.encode(value).decode()}`" for value in field.neutral)
    note = f"{field.note} Accepted: {accepted}." if accepted else field.note
    return f"| `{field.path}` | {field.sources} | {handling} | {note.replace('|', '&#124;')} |"


if __name__ == "__main__":
    PAGE.write_text(page(TABLES), encoding="utf-8")
