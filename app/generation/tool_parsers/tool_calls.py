"""Classes that the parsers of tool calls share: the body of a call, and a writer that collects the events of calls."""

import re
import secrets
import string
from collections.abc import Mapping
from typing import Protocol

from app.generation.conversation import Json
from app.generation.events import ToolCallDelta, ToolCallEnd, ToolCallStart

_SPACES = re.compile(r"\s*")


class CallBody(Protocol):
    """Parses the body of a call while it is generated, and passes it to a CallWriter."""

    done: bool
    failed: bool

    def feed(self, text: str, position: int, *, final: bool) -> int:
        """Return the position up to which `text` is parsed, starting at `position`.

        The rest must be fed again with the following text. `final` means that no text follows.
        """
        ...


def skip_space(text: str, position: int) -> int:
    return match_end(_SPACES, text, position)


def match_end(pattern: "re.Pattern[str]", text: str, position: int) -> int:
    match = pattern.match(text, position)
    return match.end() if match else position


_ALPHABET = string.ascii_letters + string.digits
_ID = re.compile(r"[\w.:/-]{1,256}", re.ASCII)
_MAX_NAME = 256  # maximum length of a tool's name in characters
_ID_LENGTH = 9  # the only length of an id that the templates of Mistral's models accept

Tools = Mapping[str, Json]  # schemas of the arguments, by tool name
CallEvent = ToolCallStart | ToolCallDelta | ToolCallEnd


def new_call_id() -> str:
    """Return a new id that every template accepts."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(_ID_LENGTH))


class CallWriter:
    """Collects the events of calls.

    `only_known` rejects unknown tools, for formats in which an answer may look like a call.
    """

    def __init__(self, tools: Tools, first_index: int, *, only_known: bool = False) -> None:
        self.tools = tools
        self.events: list[CallEvent] = []
        self._next = first_index
        self._only_known = only_known

    def start(self, name: str, call_id: str = "") -> bool:
        """Start a call, and return whether the tool's name is valid. An invalid id is replaced."""
        if not 0 < len(name) <= _MAX_NAME or not name.isprintable() or (self._only_known and name not in self.tools):
            return False
        self.events.append(ToolCallStart(self._next, call_id if _ID.fullmatch(call_id) else new_call_id(), name))
        return True

    def arguments(self, text: str) -> None:
        if text:
            self.events.append(ToolCallDelta(self._next, text))

    def end(self) -> None:
        self.events.append(ToolCallEnd(self._next))
        self._next += 1
