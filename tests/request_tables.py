"""Every table of request fields, and the page that prints them: `python -m tests.request_tables` writes it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.server.dialects import rerank_requests
from app.server.dialects.anthropic import fields as anthropic_fields
from app.server.dialects.llama_cpp import fields as llama_cpp_fields
from app.server.dialects.lm_studio import fields as lm_studio_fields
from app.server.dialects.ollama import fields as ollama_fields
from app.server.dialects.openai import fields as openai_fields
from app.server.dialects.responses import fields as responses_fields
from app.server.field_table import FieldTable, page

PAGE = Path(__file__).parents[1] / "docs" / "request-fields.md"

# By the method and path of the endpoint.
TABLES: Mapping[str, FieldTable[Any]] = {
    **openai_fields.TABLES,
    **responses_fields.TABLES,
    **anthropic_fields.TABLES,
    **ollama_fields.TABLES,
    **llama_cpp_fields.TABLES,
    **lm_studio_fields.TABLES,
    **rerank_requests.TABLES,
}

if __name__ == "__main__":
    PAGE.write_text(page(TABLES), encoding="utf-8")
