"""Tools and thinking in a request of Anthropic's API: which tools there are, which may be called, and how much is
thought.

Tools that only the API's own servers could run are left out: a model is not told what nobody does for it. Refuses to
know how models write calls.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct

from app.generation.conversation import (
    MAX_TOOLS,
    ReasoningEffort,
    ThinkingOptions,
    Tool,
    ToolName,
    ToolOptions,
    ToolUse,
    function_tool,
)
from app.server.common_fields import PositiveCount
from app.server.dialects.anthropic.client_tools import client_tool
from app.server.errors import InvalidRequest


class ToolDefinition(Struct):
    name: ToolName | None = None
    type: str | None = None  # none or "custom" for tools that are described here
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None

    def to_tool(self, place: str) -> Tool | None:
        """None for a tool that the API's servers run. Raises InvalidRequest for one without a name or a schema."""
        known = client_tool(self.type or "")
        schema, description = self.input_schema, self.description
        if schema is None and known is not None:
            schema, description = dict(known.parameters), known.description
        if schema is None and self.type in (None, "custom"):
            raise InvalidRequest(f"{place}.input_schema: it is required", parameter=f"{place}.input_schema")
        if schema is None:
            return None
        if self.name is None:
            raise InvalidRequest(f"{place}.name: it is required", parameter=f"{place}.name")
        return function_tool(self.name, description, schema, strict=self.strict)


class AutoChoice(Struct, tag_field="type", tag="auto"):
    disable_parallel_tool_use: bool | None = None


class AnyChoice(Struct, tag_field="type", tag="any"):
    disable_parallel_tool_use: bool | None = None


class OneChoice(Struct, tag_field="type", tag="tool"):
    name: ToolName
    disable_parallel_tool_use: bool | None = None


class NoChoice(Struct, tag_field="type", tag="none"):
    pass


class Thinking(Struct):
    """What is thought before the answer. Without it nothing is: clients that do not ask for thoughts read none."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"] = "disabled"
    budget_tokens: PositiveCount | None = None

    def wanted(self, effort: ReasoningEffort | None) -> ThinkingOptions:
        if self.type == "disabled":
            return ThinkingOptions.of(None, enabled=False)
        return ThinkingOptions.of(effort, [self.budget_tokens], enabled=True)


ToolDefinitions: TypeAlias = Annotated[list[ToolDefinition], Meta(max_length=MAX_TOOLS)]
ToolChoice: TypeAlias = AutoChoice | AnyChoice | OneChoice | NoChoice


def wanted_tools(definitions: Sequence[ToolDefinition], choice: ToolChoice | None) -> ToolOptions:
    """Raises InvalidRequest for a tool without a name or a schema."""
    told = (definition.to_tool(f"tools[{index}]") for index, definition in enumerate(definitions))
    tools = [tool for tool in told if tool is not None]
    match choice:
        case AnyChoice():
            return ToolOptions(tools, use=ToolUse.FORCED)
        case OneChoice(name):
            return ToolOptions(tools, [name], ToolUse.FORCED)
        case NoChoice():
            return ToolOptions(tools, [])
    return ToolOptions(tools)


def calls_are_parallel(choice: ToolChoice | None) -> bool | None:
    """Whether a reply may have several calls; None if the request does not say."""
    disabled = None if choice is None or isinstance(choice, NoChoice) else choice.disable_parallel_tool_use
    return None if disabled is None else not disabled
