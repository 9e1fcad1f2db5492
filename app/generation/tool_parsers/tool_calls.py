"""What readers of tool calls share: the body of a call, and a writer that turns what was read into events."""

import re
import secrets
import string
from collections.abc import Mapping
from typing import Protocol

from app.generation.conversation import Json
from app.generation.events import ToolCallDelta, ToolCallEnd, ToolCallStart

_SPACES = re.compile(r"\s*")


class CallBody(Protocol):
    """Reads while the text comes, and tells a CallWriter."""

    done: bool
    failed: bool

    def feed(self, text: str, position: int, *, final: bool) -> int:
        """Up to where `text` is read now, all in front of `position` having been. What is not read is to be fed again
        with what follows; `final` if nothing does."""
        ...


def skip_space(text: str, position: int) -> int:
    return match_end(_SPACES, text, position)


def match_end(pattern: "re.Pattern[str]", text: str, position: int) -> int:
    match = pattern.match(text, position)
    return match.end() if match else position


_ALPHABET = string.ascii_letters + string.digits
_ID = re.compile(r"[\w.:/-]{1,256}", re.ASCII)
_MAX_NAME = 256  # characters
_ID_LENGTH = 9  # the only length that the templates of Mistral's models take

Tools = Mapping[str, Json]  # the schema of the arguments, by name of the tool
CallEvent = ToolCallStart | ToolCallDelta | ToolCallEnd


def new_call_id() -> str:
    """An id that every template takes."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(_ID_LENGTH))


class CallWriter:
    """Collects events. `only_known` for formats that are so plain that an answer may look like them."""

    def __init__(self, tools: Tools, first_index: int, *, only_known: bool = False) -> None:
        self.tools = tools
        self.events: list[CallEvent] = []
        self._next = first_index
        self._only_known = only_known

    def start(self, name: str, call_id: str = "") -> bool:
        """Whether this may be a call; then it has begun. What nobody can send back is no name, and no id."""
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
