"""Names, arguments and results of tools."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.mcp.tools import MAX_RESULT, Tool, ToolResult, arguments_of


@given(st.text(), st.text())
def test_qualified_name_is_valid_in_the_api(server: str, name: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9_-]{2,64}", Tool(server, name, "", {}).qualified_name)


@pytest.mark.parametrize(("text", "arguments"), [("", {}), ("{}", {}), ('{"a": 1}', {"a": 1})])
def test_arguments_are_an_object(text: str, arguments: dict[str, Any]) -> None:
    assert arguments_of(text) == arguments


@pytest.mark.parametrize("text", ["[1]", "1", "{", "null", '{"a":' * 100_000])
def test_other_arguments_raise(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        arguments_of(text)


def test_result_reports_what_was_left_out() -> None:
    assert ToolResult.of("x" * (MAX_RESULT + 5)) == ToolResult("x" * MAX_RESULT, False, 5)
