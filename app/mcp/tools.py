"""Tools and their results, as the chat offers them to a model."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_NAME = 64  # characters; the limit of OpenAI's API
MAX_SCHEMA = 32 << 10  # bytes of JSON; a tool with a larger schema is left out
MAX_DESCRIPTION = 4 << 10  # characters
MAX_RESULT = 100_000  # characters of a result that the model receives

_FORBIDDEN = re.compile(r"[^A-Za-z0-9_-]")


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool of a server. `schema` is the JSON schema of its arguments."""

    server: str
    name: str
    description: str
    schema: Mapping[str, Any]

    @property
    def qualified_name(self) -> str:
        """Return the name that the model uses: unique among servers, and valid in OpenAI's API."""
        return _FORBIDDEN.sub("_", f"{self.server}__{self.name}")[:MAX_NAME]

    def as_openai(self) -> dict[str, Any]:
        """Return the tool as an entry of the `tools` field of a chat request."""
        function = {"name": self.qualified_name, "description": self.description, "parameters": self.schema}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The text that a call returned. `left_out` counts the characters that were cut off after MAX_RESULT."""

    text: str
    is_error: bool = False
    left_out: int = 0

    @property
    def complete_text(self) -> str:
        """Return the text for the model, which says how many characters are missing."""
        return f"{self.text}\n[The result was cut: {self.left_out:,} more characters.]" if self.left_out else self.text

    @classmethod
    def of(cls, text: str, *, is_error: bool = False) -> "ToolResult":
        return cls(text[:MAX_RESULT], is_error, max(len(text) - MAX_RESULT, 0))
