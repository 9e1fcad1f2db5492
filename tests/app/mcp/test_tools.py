"""Qualified names of MCP tools, and their results as text."""

import re

from hypothesis import given
from hypothesis import strategies as st

from app.mcp.tools import MAX_RESULT, Tool, ToolResult


@given(st.text(), st.text())
def test_qualified_name_is_valid_in_the_api(server: str, name: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9_-]{2,64}", Tool(server, name, "", {}).qualified_name)


def test_result_counts_the_characters_left_out() -> None:
    assert ToolResult.of("x" * (MAX_RESULT + 5)) == ToolResult("x" * MAX_RESULT, False, 5)
