"""The calls that a reader of some format has come across, as events.

Knows indices, ids and the tools there are. Refuses to know formats.
"""

import re
import secrets
import string
from collections.abc import Mapping

from app.chat.events import ToolCallDelta, ToolCallEnd, ToolCallStart
from app.chat.messages import Json

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
