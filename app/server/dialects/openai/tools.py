"""Tools and thinking in a request of OpenAI's API: which tools there are, which may be called, and what a chat
template is told besides.

Refuses to know how models write calls.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct

from app.generation.conversation import (
    MAX_TOOLS,
    ReasoningEffort,
    ThinkingBudget,
    Tool,
    ToolName,
    ToolOptions,
    ToolUse,
    function_tool,
)

MAX_VARIABLES = 32
# What our own part of the template's variables is called, so that no client fills it.
OWN_VARIABLES = frozenset(("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"))

VariableName: TypeAlias = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
TemplateVariables: TypeAlias = Annotated[dict[VariableName, Any], Meta(max_length=MAX_VARIABLES)]


class ReasoningOptions(Struct):
    """As OpenRouter has it."""

    effort: ReasoningEffort | None = None
    max_tokens: ThinkingBudget | None = None
    enabled: bool | None = None
    exclude: bool | None = None  # the reply leaves its thoughts out


class FunctionDefinition(Struct):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(Struct):
    type: Literal["function"]
    function: FunctionDefinition

    def to_tool(self) -> Tool:
        told = self.function
        return function_tool(told.name, told.description, told.parameters, strict=told.strict)


class NamedFunction(Struct):
    name: ToolName


class NamedTool(Struct, tag_field="type", tag="function"):
    function: NamedFunction


class AllowedFunction(Struct):
    type: Literal["function"]
    function: NamedFunction


class AllowedList(Struct):
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedFunction], Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(Struct, tag_field="type", tag="allowed_tools"):
    allowed_tools: AllowedList


ToolDefinitions: TypeAlias = Annotated[list[ToolDefinition], Meta(max_length=MAX_TOOLS)]
ToolChoice: TypeAlias = Literal["none", "auto", "required"] | NamedTool | AllowedTools


def wanted_tools(definitions: Sequence[ToolDefinition], choice: ToolChoice | None) -> ToolOptions:
    tools = [definition.to_tool() for definition in definitions]
    match choice:
        case "none":
            return ToolOptions(tools, [])
        case "required":
            return ToolOptions(tools, use=ToolUse.FORCED)
        case NamedTool(function):
            return ToolOptions(tools, [function.name], ToolUse.FORCED)
        case AllowedTools(allowed):
            use = ToolUse.FORCED if allowed.mode == "required" else ToolUse.FREE
            return ToolOptions(tools, [tool.function.name for tool in allowed.tools], use)
    return ToolOptions(tools)
