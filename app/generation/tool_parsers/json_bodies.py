"""Bodies of calls in JSON: only the arguments after the tool's name, or objects with name and arguments.

Parsing takes time linear in the length of the text.
"""

import json
import re

from app.generation.tool_parsers.relaxed_json import RelaxedJson
from app.generation.tool_parsers.tool_calls import CallWriter, match_end, skip_space

NAME_KEYS = ("name", "tool_name", "function")
ARGUMENT_KEYS = ("arguments", "parameters", "args")
_ID_KEY = "id"
_WRAPPER_KEY = "function"  # key of an object around the call, which some models write
_MAX_WRAPPERS = 2
_BETWEEN_OBJECTS = re.compile(r"[\s,;]*")


class ArgumentsBody:
    """Parses the arguments of a call as one JSON object. The name of the tool is known."""

    def __init__(self, writer: CallWriter, name: str, call_id: str) -> None:
        self.done = self.failed = False
        self._writer = writer
        self._name = name
        self._id = call_id
        self._json: RelaxedJson | None = None

    def feed(self, text: str, position: int, *, final: bool) -> int:
        if self._json is None:
            position = skip_space(text, position)
            if position == len(text):
                return position
            if text[position] != "{" or not self._writer.start(self._name, self._id):
                self.failed = True
                return position
            self._json = RelaxedJson()
        position, out = self._json.feed(text, position, final=final)
        self._writer.arguments(out)
        self.failed = self._json.failed
        if self._json.done:
            self.done = True
            self._writer.end()
        return position


class ObjectsBody:
    """Parses one JSON object per call, either in a list or in sequence."""

    def __init__(self, writer: CallWriter, *, keyed: bool = False) -> None:
        """`keyed`: each object has the tool's name as its only key."""
        self.done = self.failed = False
        self._writer = writer
        self._keyed = keyed
        self._in_list: bool | None = None
        self._calls = 0
        self._object: _CallObject | None = None

    def feed(self, text: str, position: int, *, final: bool) -> int:
        while not (self.done or self.failed):
            if self._object is None:
                position = self._between(text, position, final)
                if self._object is None:
                    break
            position = self._object.feed(text, position, final=final)
            self.failed = self._object.failed
            if not self._object.done:
                break
            self._object = None
            self._calls += 1
        return position

    def _between(self, text: str, position: int, final: bool) -> int:
        after = skip_space(text, position) if self._calls == 0 else match_end(_BETWEEN_OBJECTS, text, position)
        if after == len(text):
            self.done = final and self._calls > 0
            return after
        if self._in_list is None and text[after] == "[":
            self._in_list = True
            return self._between(text, after + 1, final)
        self._in_list = bool(self._in_list)
        if text[after] == "{":
            self._object = _CallObject(self._writer, keyed=self._keyed)
            return after
        if self._in_list and text[after] == "]":
            self.done, self.failed = self._calls > 0, self._calls == 0
            return after + 1
        # Outside of a list, other text ends the calls.
        self.done, self.failed = self._calls > 0, self._calls == 0
        return after


class _CallObject:
    """Parses one object that contains the name of a tool and its arguments, in any order."""

    def __init__(self, writer: CallWriter, *, keyed: bool) -> None:
        self.done = self.failed = False
        self._writer = writer
        self._keyed = keyed
        self._depth = 0
        self._key: str | None = None
        self._value: RelaxedJson | None = None
        self._written: list[str] = []  # JSON of the current value so far
        self._name = ""
        self._id = ""
        self._held: list[str] | None = None  # arguments that are held back because they precede the name
        self._started = False

    def feed(self, text: str, position: int, *, final: bool) -> int:
        while not (self.done or self.failed) and position < len(text):
            value = self._value
            reached = self._between(text, position) if value is None else self._read(value, text, position, final)
            if reached == position and self._value is value:
                break
            position = reached
        return position

    def _between(self, text: str, position: int) -> int:
        """Parse the punctuation between names and values."""
        character = text[position]
        if character.isspace() or (character == "," and self._depth):
            return position + 1
        if not self._depth:
            self._depth = 1
            return position + 1
        if self._key is None and character == "}":
            self._close()
            return position + 1
        if self._key is not None and character == ":":
            return self._after_colon(text, position + 1)
        if self._key is None and character in "\"'":
            self._value = RelaxedJson()
            return position
        self.failed = True
        return position

    def _after_colon(self, text: str, position: int) -> int:
        start = skip_space(text, position)
        if start == len(text):
            return position - 1
        if self._key == _WRAPPER_KEY and text[start] == "{" and not self._keyed:
            self._depth += 1
            self._key = None
            self.failed = self._depth > _MAX_WRAPPERS
            return start + 1
        if self._keyed and not self._name:
            self._name = self._key or ""
        if self._is_arguments() and text[start] == "{":
            self._begin_arguments()
        self._value = RelaxedJson()
        return start

    def _is_arguments(self) -> bool:
        return self._keyed or self._key in ARGUMENT_KEYS

    def _begin_arguments(self) -> None:
        if self._started or self._held is not None:
            self.failed = True
        elif self._name:
            self._start()
        else:
            self._held = []

    def _start(self) -> None:
        self._started = self._writer.start(self._name, self._id)
        self.failed = not self._started

    def _read(self, value: RelaxedJson, text: str, position: int, final: bool) -> int:
        position, out = value.feed(text, position, final=final)
        if self._key is not None and self._is_arguments() and self._started:
            self._writer.arguments(out)
        else:
            self._written.append(out)
        self.failed = self.failed or value.failed
        if value.done:
            self._value = None
            written, self._written = "".join(self._written), []
            self._complete_member(written)
        return position

    def _complete_member(self, written: str) -> None:
        """Process a complete name or value."""
        key, self._key = self._key, None
        if key is None:
            self._key = str(json.loads(written))
        elif self._keyed or key in ARGUMENT_KEYS:
            if not self._started:
                self._complete_arguments(written)
        elif key in NAME_KEYS and written.startswith('"') and not self._name:
            self._name = str(json.loads(written))
            if self._held is not None:
                self._flush()
        elif key == _ID_KEY and written.startswith('"'):
            self._id = str(json.loads(written))

    def _complete_arguments(self, written: str) -> None:
        """Process arguments that could not be streamed. They may be encoded as a string."""
        if written.startswith('"'):
            inner = RelaxedJson()
            source = str(json.loads(written))
            reached, written = inner.feed(source, skip_space(source, 0), final=True)
            self.failed = not inner.done or bool(source[reached:].strip())
        if written == "null":
            written = "{}"
        self.failed = self.failed or not written.startswith("{")
        self._held = [written]
        if self._name and not self.failed:
            self._flush()

    def _flush(self) -> None:
        self._start()
        if self._started:
            self._writer.arguments("".join(self._held or ()))

    def _close(self) -> None:
        self._depth -= 1
        if self._depth:
            return
        if not self._started and not self._name:
            self.failed = True
            return
        if not self._started:
            self._start()
            if self.failed:
                return
            self._writer.arguments("{}")
        self._writer.end()
        self.done = True
