"""The tools that Anthropic's API names by a type alone, and that a client runs by itself: what a model has to be told
of them. A table; refuses to know requests.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from app.generation.conversation import Json

_VERSION = re.compile(r"_\d{8}\Z")
_TEXT: Final[Mapping[str, Json]] = {"type": "string"}
_LINE: Final[Mapping[str, Json]] = {"type": "integer"}


@dataclass(frozen=True, slots=True)
class ClientTool:
    """What a client does when it is called."""

    description: str
    parameters: Mapping[str, Json]  # JSON schema of its arguments


def client_tool(kind: str) -> ClientTool | None:
    """Of a type such as bash_20250124; None for one that no client runs, or that needs eyes."""
    return _TOOLS.get(_VERSION.sub("", kind))


def _file_commands(*names: str, required: Sequence[str] = ("command", "path"), **more: Json) -> Mapping[str, Json]:
    """The arguments of a tool that does something with a file."""
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
        "Runs a command in a bash session that goes on from call to call; restart begins a new one.",
        {"type": "object", "properties": {"command": _TEXT, "restart": {"type": "boolean"}}},
    ),
    "text_editor": ClientTool(
        "Shows and changes text files: view a file or some of its lines, create one with file_text, replace old_str by "
        "new_str, insert text behind a line.",
        _file_commands(*_EDITING),
    ),
    "memory": ClientTool(
        "Keeps notes in files under /memories from one conversation to the next.",
        _file_commands(*_EDITING, "delete", "rename", required=["command"], old_path=_TEXT, new_path=_TEXT),
    ),
}
