"""Tools of a request to the Responses API, and the functions that a model sees.

Models support only functions. A custom tool becomes a function with one string argument. Functions of a namespace get
its name as a prefix. Tools that only OpenAI's servers can run are ignored.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from app.generation.conversation import MAX_TOOLS, Tool, ToolName, ToolOptions, ToolUse, function_tool


class CustomFormat(Struct, omit_defaults=True):
    type: str
    syntax: str | None = None
    definition: str | None = None


class SingleTool(Struct, omit_defaults=True):
    """A tool of any type, with the fields that are read."""

    type: Annotated[str, Meta(max_length=64)]
    name: ToolName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: CustomFormat | None = None  # format of a custom tool


class ToolDefinition(SingleTool, omit_defaults=True):
    tools: Annotated[list[SingleTool], Meta(max_length=MAX_TOOLS)] | None = None  # tools of a namespace


class NamedTool(Struct, omit_defaults=True):
    type: str
    name: ToolName | None = None


class ChosenTools(Struct, omit_defaults=True):
    """A choice of one tool by its name, or of several allowed tools."""

    type: str
    name: ToolName | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[NamedTool], Meta(min_length=1, max_length=MAX_TOOLS)] | None = None


_NAMED = ("function", "custom", "namespace")
_FUNCTION = ("name", "description", "parameters", "strict")

ToolDefinitions: TypeAlias = Annotated[list[ToolDefinition], Meta(max_length=MAX_TOOLS)]
ToolChoice: TypeAlias = Literal["none", "auto", "required"] | ChosenTools


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool that the model can call."""

    tool: Tool
    name: str  # name that the client uses
    namespace: str | None
    is_custom: bool


class OfferedTools:
    """The tools of a request."""

    def __init__(self, definitions: Sequence[ToolDefinition]) -> None:
        self._definitions = definitions

    @cached_property
    def _by_name(self) -> dict[str, OfferedTool]:
        return {offered.tool.name: offered for offered in self._all}

    @cached_property
    def _all(self) -> list[OfferedTool]:
        return list(_offered(self._definitions))

    def find(self, name: str) -> OfferedTool | None:
        """Return the tool with the name that the model uses, or None."""
        return self._by_name.get(name)

    def options(self, choice: ToolChoice | None) -> ToolOptions:
        tools = [offered.tool for offered in self._all]
        match choice:
            case "none":
                return ToolOptions(tools, [])
            case "required":
                return ToolOptions(tools, use=ToolUse.FORCED)
            case ChosenTools("allowed_tools", _, mode, several):
                use = ToolUse.FORCED if mode == "required" else ToolUse.FREE
                return ToolOptions(tools, [name for one in several or () for name in self._chosen_names(one)], use)
            case ChosenTools(kind, name):
                return ToolOptions(tools, self._chosen_names(NamedTool(kind, name)), ToolUse.FORCED)
        return ToolOptions(tools)

    def _chosen_names(self, chosen: NamedTool) -> list[str]:
        """Return the names that the model uses for a chosen tool; the choice's name or type if no tool matches."""
        name = chosen.name or chosen.type
        found = [offered.tool.name for offered in self._all if name in (offered.name, offered.tool.name)]
        return found or [name]

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, problem) pairs for problems that the bounds of single fields cannot express."""
        for index, definition in enumerate(self._definitions):
            if definition.type in _NAMED and definition.name is None:
                yield f"tools[{index}].name", "it is required."
            for inner, one in enumerate(definition.tools or ()):
                if one.type in _NAMED and one.name is None:
                    yield f"tools[{index}].tools[{inner}].name", "it is required."

    @property
    def reported(self) -> list[dict[str, Any]]:
        """The tools as a response lists them, with all fields of functions."""
        reported: list[dict[str, Any]] = []
        for definition in self._definitions:
            if definition.type == "function":
                parts = definition.name, definition.description, definition.parameters, bool(definition.strict)
                reported.append({"type": "function", **dict(zip(_FUNCTION, parts, strict=True))})
            elif definition.type in ("custom", "namespace"):
                reported.append(msgspec.to_builtins(definition))
        return reported


def qualified(name: str, namespace: str | None) -> str:
    """Return the name that the model uses for a tool."""
    return name if namespace is None else f"{namespace.rstrip('_')}__{name}"


def _offered(definitions: Sequence[ToolDefinition]) -> Iterator[OfferedTool]:
    for definition in definitions:
        if definition.type == "namespace":
            for one in definition.tools or ():
                yield from _offered_tool(one, definition.name)
        else:
            yield from _offered_tool(definition, None)


def _offered_tool(definition: SingleTool, namespace: str | None) -> Iterator[OfferedTool]:
    """Yield the tool unless only a server could run it."""
    name = definition.name or ""
    if definition.type == "function":
        parts = definition.description, definition.parameters
        tool = function_tool(qualified(name, namespace), *parts, strict=definition.strict)
        yield OfferedTool(tool, name, namespace, is_custom=False)
    elif definition.type == "custom":
        tool = function_tool(qualified(name, namespace), definition.description, _text_schema(definition.format))
        yield OfferedTool(tool, name, namespace, is_custom=True)


def _text_schema(custom_format: CustomFormat | None) -> dict[str, Any]:
    """Return the schema of a custom tool's input. Its description has the grammar that the client asks for."""
    text = {"type": "string"}
    if custom_format is not None and custom_format.definition:
        text["description"] = f"In this {custom_format.syntax or 'grammar'}:\n{custom_format.definition}"
    return {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}
