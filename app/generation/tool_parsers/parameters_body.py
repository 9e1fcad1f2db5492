"""Bodies of calls with parameters between tags, which may be nested."""

import json
from collections.abc import Iterator, Mapping, Sequence

from app.generation.conversation import Json
from app.generation.tool_parsers.argument_types import TEXT, Types, argument_json, member_schema, types_in
from app.generation.tool_parsers.markup import WAIT, Found, Markup, NotYet
from app.generation.tool_parsers.relaxed_json import longest_overlap
from app.generation.tool_parsers.tool_calls import CallWriter


class ParameterMarkup:
    """The markup of a parameter, with holes for its key, its value, and in some formats its type."""

    def __init__(self, written: str) -> None:
        head, _, close = written.partition("{value}")
        self.head, self.close = Markup(head), Markup(close)
        # One line break on each side belongs to the format. A value may start and end with more.
        self.opens_line = head.endswith("\n")
        self.closes_line = close.startswith("\n")
        if self.opens_line:
            self.head = Markup(head[:-1])
        if self.closes_line:
            self.close = Markup(close[1:])


_ITEM = "item"
_EMPTY = {"array": "[]", "object": "{}"}
_MAX_DEPTH = 16


def nested_json(text: str, types: Types, parameter: ParameterMarkup, schema: Json, depth: int = 0) -> str:
    """Return the JSON of an argument, given its types and schema. Without nested tags, that is the JSON of its text."""
    members = list(_members(text, parameter)) if depth < _MAX_DEPTH else []
    if not members:
        empty = [_EMPTY[kind] for kind in sorted(types & _EMPTY.keys())]
        return empty[0] if empty and not text.strip() else argument_json(text, types)
    if all(key == _ITEM for key, _ in members) and "object" not in types:
        inner = schema.get("items") if isinstance(schema, Mapping) else None
        items = [nested_json(value, types_in(inner, schema), parameter, inner, depth + 1) for _, value in members]
        return f"[{', '.join(items)}]"
    written = []
    for key, value in members:
        inner = member_schema(schema, key)
        part = nested_json(value, types_in(inner, schema), parameter, inner, depth + 1)
        written.append(f"{json.dumps(key, ensure_ascii=False)}: {part}")
    return f"{{{', '.join(written)}}}"


def _members(text: str, parameter: ParameterMarkup) -> Iterator[tuple[str, str]]:
    """Yield each key with the text between its tags. Stops at other text."""
    position = 0
    while isinstance(head := parameter.head.match(text, position, final=True), Found):
        end = _end(text, head.end, head.holes["key"], parameter)
        if end is None:
            return
        close, position = end
        yield head.holes["key"], text[head.end : close]


def _end(text: str, start: int, key: str, parameter: ParameterMarkup) -> tuple[int, int] | None:
    """Return the start and end of the closing tag of `key`, after nested tags of the same name."""
    opening, closed, position = parameter.head.filled(key=key), 0, start
    while (position := text.find(parameter.close.first, position)) >= 0:
        found = parameter.close.match(text, position, final=True, known={"key": key})
        if isinstance(found, Found):
            if text.count(opening, start, position) == closed:
                return position, found.end
            closed += 1
        position += 1
    return None


_TEXT_WORDS = ("true", "string")  # values of the type attribute that mark a parameter as text
_TYPE_HOLE = "type"


class ParametersBody:
    """Parses the parameters of one call whose name is known, up to `tail`."""

    def __init__(
        self, writer: CallWriter, name: str, call_id: str, parameters: Sequence[ParameterMarkup], tail: Markup
    ) -> None:
        self.done = self.failed = False
        self._writer = writer
        self._name = name
        self._id = call_id
        self._parameters = parameters
        self._tail = tail
        self._started = False
        self._count = 0
        self._value: _Value | None = None

    def feed(self, text: str, position: int, *, final: bool) -> int:
        while not (self.done or self.failed):
            if self._value is None:
                position = self._between(text, position, final)
                if self._value is None:
                    break
            position = self._value.feed(text, position, final)
            if not self._value.done:
                break
            self._value = None
        return position

    def follows(self, text: str, position: int, *, final: bool) -> bool | NotYet:
        """Whether another parameter or the end of the call follows."""
        while position < len(text) and text[position].isspace():
            position += 1
        if position == len(text):
            return final or WAIT
        candidates = (self._tail, *(parameter.head for parameter in self._parameters))
        found = [markup.match(text, position, final=final) for markup in candidates]
        if any(isinstance(one, Found) for one in found):
            return True
        return WAIT if WAIT in found else False

    def _between(self, text: str, position: int, final: bool) -> int:
        start = position
        while start < len(text) and text[start].isspace():
            start += 1
        if start == len(text):
            return start
        end = self._tail.match(text, start, final=final)
        if end is WAIT:
            return start
        if end is not None:
            self._end()
            return start
        for parameter in self._parameters:
            found = parameter.head.match(text, start, final=final)
            if found is WAIT:
                return start
            if isinstance(found, Found):
                if self._begin():
                    self._begin_value(parameter, found.holes)
                    return found.end
                return start
        self.failed = True
        return start

    def _end(self) -> None:
        if self._begin():
            self._writer.arguments("}" if self._count else "{}")
            self._writer.end()
            self.done = True

    def _begin(self) -> bool:
        if not self._started:
            self._started = self._writer.start(self._name, self._id)
            self.failed = not self._started
        return self._started

    def _begin_value(self, parameter: ParameterMarkup, holes: Mapping[str, str]) -> None:
        key = holes["key"]
        root = self._writer.tools.get(self._name)
        schema = member_schema(root, key)
        types = _types(types_in(schema, root), holes.get(_TYPE_HOLE))
        self._writer.arguments((", " if self._count else "{") + json.dumps(key, ensure_ascii=False) + ": ")
        self._count += 1
        self._value = _Value(self._writer, parameter, holes, types, schema, self)


def _types(types: Types, type_word: str | None) -> Types:
    """Return the types of an argument. A type in its tag overrides the schema."""
    if type_word is None:
        return types
    return TEXT if type_word in _TEXT_WORDS else types - TEXT


class _Value:
    """Parses the value of one parameter."""

    def __init__(
        self,
        writer: CallWriter,
        parameter: ParameterMarkup,
        holes: Mapping[str, str],
        types: Types,
        schema: Json,
        body: ParametersBody,
    ) -> None:
        self.done = False
        self._writer = writer
        self._parameter = parameter
        self._holes = holes
        self._types = types
        self._schema = schema
        self._body = body
        self._held: list[str] = []
        self._started = False

    def feed(self, text: str, position: int, final: bool) -> int:
        if not self._started:
            if position == len(text):
                return position
            self._started = True
            position += self._parameter.opens_line and text[position] == "\n"
            if self._types == TEXT:
                self._writer.arguments('"')
        first = self._parameter.close.first
        while (start := text.find(first, position)) >= 0:
            end = self._close(text, start, final)
            if end is WAIT:
                return self._append_before_tag(text, position, start)
            if isinstance(end, int):
                return self._end(text, position, start, end)
            position = self._append(text, position, start + 1)
        if final:
            return self._append(text, position, len(text))
        return self._append_before_tag(text, position, len(text) - longest_overlap(text, position, first))

    def _close(self, text: str, start: int, final: bool) -> int | NotYet | None:
        found = self._parameter.close.match(text, start, final=final, known=self._holes)
        if not isinstance(found, Found):
            return found
        follows = self._body.follows(text, found.end, final=final)
        if follows is WAIT:
            return WAIT
        return found.end if follows else None

    def _append_before_tag(self, text: str, start: int, end: int) -> int:
        """Append the text up to `end`, where the closing tag may start.

        A line break before it may belong to the tag.
        """
        end -= self._parameter.closes_line and end > start and text[end - 1] == "\n"
        return self._append(text, start, end)

    def _append(self, text: str, start: int, end: int) -> int:
        if self._types == TEXT:
            self._writer.arguments(json.dumps(text[start:end], ensure_ascii=False)[1:-1])
        else:
            self._held.append(text[start:end])
        return end

    def _end(self, text: str, position: int, start: int, end: int) -> int:
        self._append_before_tag(text, position, start)
        if self._types == TEXT:
            self._writer.arguments('"')
        else:
            self._writer.arguments(nested_json("".join(self._held), self._types, self._parameter, self._schema))
        self.done = True
        return end
