"""Which tools a request offers and which of them may be called: what every dialect makes of its own fields, and the
check that they go together.

Refuses to know wire formats, and how models write calls.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from msgspec import Meta

from app.generation.conversation import Tool, ToolUse
from app.generation.messages import Json

_NO_ARGUMENTS: dict[str, Json] = {"type": "object", "properties": {}}

ToolName: TypeAlias = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.:/-]{1,128}$")]


def function_tool(
    name: str, description: str | None, parameters: Mapping[str, Json] | None, *, strict: bool | None = None
) -> Tool:
    """A function, with all that templates print of one, since some fail on what is missing."""
    schema = parameters or _NO_ARGUMENTS
    function: dict[str, Json] = {"name": name, "description": description or "", "parameters": schema}
    return Tool(name, {"type": "function", "function": function}, schema, bool(strict))


@dataclass(frozen=True, slots=True)
class WantedTools:
    """The tools of a request."""

    tools: Sequence[Tool]
    named: Sequence[str] | None = None  # those that may be called; None: any. The others stay in the prompt
    use: ToolUse = ToolUse.FREE

    @property
    def allowed(self) -> Sequence[Tool] | None:
        return None if self.named is None else [tool for tool in self.tools if tool.name in self.named]

    def problems(self) -> Iterator[tuple[str, str]]:
        """What no single field's bounds can say, with the field."""
        names = [tool.name for tool in self.tools]
        if len(set(names)) < len(names):
            yield "tools", "two of them have the same name."
        if (self.named or self.use is ToolUse.FORCED) and not names:
            yield "tool_choice", "it needs tools."
        for name in self.named or ():
            if names and name not in names:
                yield "tool_choice", f"none of the tools is called {name}."
