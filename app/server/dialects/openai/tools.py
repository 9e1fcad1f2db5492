"""Tools and thinking in a request of OpenAI's API: which tools there are, which may be called, and what a chat
template is told besides.

Refuses to know how models write calls.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct

from app.chat.conversation import MAX_TOOLS, Tool, ToolUse
from app.chat.messages import Json

MAX_VARIABLES = 32
# What our own part of the template's variables is called, so that no client fills it.
OWN_VARIABLES = frozenset(("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"))
_NO_ARGUMENTS: dict[str, Json] = {"type": "object", "properties": {}}
_NO_THOUGHT = ("none", "minimal")

ToolName: TypeAlias = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.:/-]{1,128}$")]
VariableName: TypeAlias = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
TemplateVariables: TypeAlias = Annotated[dict[VariableName, Any], Meta(max_length=MAX_VARIABLES)]
ReasoningEffort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


ThinkingBudget: TypeAlias = Annotated[int, Meta(ge=-1, le=2**31 - 1)]  # tokens; -1: any number


class ReasoningOptions(Struct):
    """As OpenRouter has it."""

    effort: ReasoningEffort | None = None
    max_tokens: ThinkingBudget | None = None
    enabled: bool | None = None


class FunctionDefinition(Struct):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(Struct):
    type: Literal["function"]
    function: FunctionDefinition

    def to_tool(self) -> Tool:
        """With all that templates print of a tool, since some fail on what is missing."""
        told, parameters = self.function, self.function.parameters or _NO_ARGUMENTS
        function = {"name": told.name, "description": told.description or "", "parameters": parameters}
        return Tool(told.name, {"type": "function", "function": function}, parameters, bool(told.strict))


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


def named(choice: ToolChoice | None) -> Sequence[str] | None:
    """The tools that a choice names; None: it names none, and any may be called."""
    match choice:
        case "none":
            return []  # they stay in the prompt, so that what is known of it is of use
        case NamedTool(function):
            return [function.name]
        case AllowedTools(allowed):
            return [tool.function.name for tool in allowed.tools]
    return None


def use_of(choice: ToolChoice | None) -> ToolUse:
    match choice:
        case "required" | NamedTool():
            return ToolUse.FORCED
        case AllowedTools(allowed) if allowed.mode == "required":
            return ToolUse.FORCED
    return ToolUse.FREE


def problems(definitions: Sequence[ToolDefinition], choice: ToolChoice | None) -> Iterator[tuple[str, str]]:
    """What no single field's bounds can say, with the field."""
    names = [definition.function.name for definition in definitions]
    if len(set(names)) < len(names):
        yield "tools", "two of them have the same name."
    if choice not in (None, "none", "auto") and not names:
        yield "tool_choice", "it needs tools."
    for name in named(choice) or ():
        if names and name not in names:
            yield "tool_choice", f"none of the tools is called {name}."


@dataclass(frozen=True, slots=True)
class WantedThinking:
    """How a model is to think, whichever fields say so."""

    effort: ReasoningEffort | None
    budget: int | None  # tokens; None: any number
    enabled: bool | None  # None: as the template has it

    @classmethod
    def of(
        cls, options: ReasoningOptions | None, effort: ReasoningEffort | None, budgets: Sequence[int | None]
    ) -> "WantedThinking":
        """Of several budgets the least counts, and less than 0 is none."""
        options = options or ReasoningOptions()
        effort = effort or options.effort
        given = [budget for budget in (*budgets, options.max_tokens) if budget is not None and budget >= 0]
        if effort == "none" or (effort is None and options.enabled is False):
            given.append(0)  # for templates that cannot switch it off
        enabled = options.enabled if effort is None else effort not in _NO_THOUGHT
        return cls(effort, min(given, default=None), False if 0 in given else enabled)

    def template_variables(self, given: TemplateVariables | None) -> dict[str, Json]:
        """What a template is told of it, by the names that templates have; what the client says itself counts more."""
        variables: dict[str, Json] = {} if self.effort is None else {"reasoning_effort": self.effort}
        if self.enabled is not None:
            variables |= {"enable_thinking": self.enabled, "thinking": self.enabled}
        return variables | (given or {})
