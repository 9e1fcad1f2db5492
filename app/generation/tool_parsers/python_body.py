"""Bodies of calls in Python syntax. Parsing takes time linear in the length of the text."""

import json
import re

from app.generation.tool_parsers.relaxed_json import RelaxedJson
from app.generation.tool_parsers.tool_calls import CallWriter, match_end, skip_space

_BETWEEN = re.compile(r"[\s,;]*")
_NAME = re.compile(r"[^\W\d][\w.]*")
_METHOD = ".call"  # suffix of calls of Llama's built-in tools


class PythonBody:
    """Parses Python calls with keyword arguments: `[now(), weather(city='Rome', days=2)]`."""

    def __init__(self, writer: CallWriter) -> None:
        self.done = self.failed = False
        self._writer = writer
        self._in_list: bool | None = None
        self._calls = 0
        self._in_call = False
        self._arguments = 0
        self._value: RelaxedJson | None = None

    def feed(self, text: str, position: int, *, final: bool) -> int:
        while not (self.done or self.failed):
            value, in_call = self._value, self._in_call
            if value is not None:
                reached = self._read(value, text, position, final)
            else:
                reached = self._argument(text, position) if in_call else self._between(text, position, final)
            if reached == position and self._value is value and self._in_call == in_call:
                break
            position = reached
        return position

    def _read(self, value: RelaxedJson, text: str, position: int, final: bool) -> int:
        position, out = value.feed(text, position, final=final)
        self._writer.arguments(out)
        self.failed = value.failed
        if value.done:
            self._value = None
        return position

    def _between(self, text: str, position: int, final: bool) -> int:
        after = match_end(_BETWEEN, text, position) if self._calls else skip_space(text, position)
        if after == len(text):
            self.done = final and self._calls > 0
            return position
        if self._in_list is None:
            self._in_list = text[after] == "["
            after += self._in_list
            if self._in_list:
                return after
        if text[after] == "]" or not (name := _NAME.match(text, after)):
            self.done, self.failed = self._calls > 0, self._calls == 0
            return after + (text[after] == "]" and self._in_list)
        if name.end() == len(text) and not final:
            return position
        if not text.startswith("(", name.end()) or not self._writer.start(name.group().removesuffix(_METHOD)):
            self.done, self.failed = self._calls > 0, self._calls == 0
            return position
        self._in_call, self._arguments = True, 0
        return name.end() + 1

    def _argument(self, text: str, position: int) -> int:
        """Parse up to the value of the next argument, or the end of the call."""
        after = match_end(_BETWEEN, text, position) if self._arguments else skip_space(text, position)
        if after == len(text):
            return position
        if text[after] == ")":
            self._writer.arguments("}" if self._arguments else "{}")
            self._writer.end()
            self._in_call = False
            self._calls += 1
            return after + 1
        name = _NAME.match(text, after)
        equals = skip_space(text, name.end()) if name else after
        value = skip_space(text, equals + 1)
        if name is not None and value >= len(text):
            return position
        if name is None or text[equals] != "=":
            self.failed = True
            return position
        self._writer.arguments((", " if self._arguments else "{") + json.dumps(name.group()) + ": ")
        self._arguments += 1
        self._value = RelaxedJson()
        return value
