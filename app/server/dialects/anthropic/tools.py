"""Tools and thinking in a request of Anthropic's API: tool definitions, tool choice, and the thinking budget.

Tools that only the API's own servers can run are left out of the prompt. Some tools run on the client, and the API
names them only by type. A table in this module defines them.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeAlias

from msgspec import Meta, Struct

from app.generation.conversation import (
    MAX_TOOLS,
    Json,
    ReasoningEffort,
    ThinkingOptions,
    Tool,
    ToolName,
    ToolOptions,
    ToolUse,
    function_tool,
)
from app.server.http.errors import InvalidRequest
from app.server.request_fields import PositiveCount


class ToolDefinition(Struct):
    name: ToolName | None = None
    type: str | None = None  # absent or "custom" for tools with a schema
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None

    def to_tool(self, path: str) -> Tool | None:
        """Convert the definition. Returns None for a tool that the API's servers run.

        Raises InvalidRequest if the name or the schema is missing.
        """
        known = client_tool(self.type or "")
        schema, description = self.input_schema, self.description
        if schema is None and known is not None:
            schema, description = dict(known.parameters), known.description
        if schema is None and self.type in (None, "custom"):
            raise InvalidRequest(f"{path}.input_schema: it is required", parameter=f"{path}.input_schema")
        if schema is None:
            return None
        if self.name is None:
            raise InvalidRequest(f"{path}.name: it is required", parameter=f"{path}.name")
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
    """The thinking before the answer. It is off by default, because clients that do not request it do not read it."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"] = "disabled"
    budget_tokens: PositiveCount | None = None

    def options(self, effort: ReasoningEffort | None) -> ThinkingOptions:
        if self.type == "disabled":
            return ThinkingOptions.of(None, enabled=False)
        return ThinkingOptions.of(effort, [self.budget_tokens], enabled=True)


ToolDefinitions: TypeAlias = Annotated[list[ToolDefinition], Meta(max_length=MAX_TOOLS)]
ToolChoice: TypeAlias = AutoChoice | AnyChoice | OneChoice | NoChoice


def tool_options(definitions: Sequence[ToolDefinition], choice: ToolChoice | None) -> ToolOptions:
    """Convert the tools and the choice. Raises InvalidRequest for a tool without a name or a schema."""
    converted = (definition.to_tool(f"tools[{index}]") for index, definition in enumerate(definitions))
    tools = [tool for tool in converted if tool is not None]
    match choice:
        case AnyChoice():
            return ToolOptions(tools, use=ToolUse.FORCED)
        case OneChoice(name):
            return ToolOptions(tools, [name], ToolUse.FORCED)
        case NoChoice():
            return ToolOptions(tools, [])
    return ToolOptions(tools)


def calls_are_parallel(choice: ToolChoice | None) -> bool | None:
    """Whether a reply may have several calls; None if the request does not set it."""
    disabled = None if choice is None or isinstance(choice, NoChoice) else choice.disable_parallel_tool_use
    return None if disabled is None else not disabled


_VERSION = re.compile(r"_\d{8}\Z")
_TEXT: Final[Mapping[str, Json]] = {"type": "string"}
_LINE: Final[Mapping[str, Json]] = {"type": "integer"}


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A tool that clients run."""

    description: str
    parameters: Mapping[str, Json]  # JSON schema of the arguments


def client_tool(kind: str) -> ClientTool | None:
    """Return the tool of a type such as bash_20250124, or None if no client runs it or it needs images."""
    return _TOOLS.get(_VERSION.sub("", kind))


def _file_commands(*names: str, required: Sequence[str] = ("command", "path"), **more: Json) -> Mapping[str, Json]:
    """Return the schema of a tool for files."""
    command: Json = {"type": "string", "enum": names}
    fields: Mapping[str, Json] = {
        "path": _TEXT,
        "file_text": _TEXT,
        "old_str": _TEXT,
        "new_str": _TEXT,
        "insert_line": _LINE,
        "insert_text": _TEXT,
        "view_range": {"type": "array", "items": _LINE},
    }
    return {"type": "object", "properties": {"command": command, **fields, **more}, "required": required}


_EDITING = ("view", "create", "str_replace", "insert")
_TOOLS: Final[Mapping[str, ClientTool]] = {
    "bash": ClientTool(
        "Runs a command in a bash session that persists between calls; restart starts a new one.",
        {"type": "object", "properties": {"command": _TEXT, "restart": {"type": "boolean"}}},
    ),
    "text_editor": ClientTool(
        "Shows and changes text files: view a file or some of its lines, create one with file_text, replace old_str by "
        "new_str, insert text after a line.",
        _file_commands(*_EDITING),
    ),
    "memory": ClientTool(
        "Keeps notes in files under /memories from one conversation to the next.",
        _file_commands(*_EDITING, "delete", "rename", required=["command"], old_path=_TEXT, new_path=_TEXT),
    ),
}
