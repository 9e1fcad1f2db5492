"""An argument whose parts are parameters themselves, with tags inside of tags, becomes JSON (MiniMax M3).

    <options><a>1</a><b><item>x</item><item>y</item></b></options>      {"a": 1, "b": ["x", "y"]}

Knows one whole argument. What it does not understand is a text.
"""

import json
from collections.abc import Iterator, Mapping

from app.chat.messages import Json
from app.chat.reply_formats.argument_types import Types, argument_json, member_schema, types_in
from app.chat.reply_formats.markup import Found
from app.chat.reply_formats.parameter_markup import ParameterMarkup

_ITEM = "item"
_EMPTY = {"array": "[]", "object": "{}"}
_MAX_DEPTH = 16


def nested_json(text: str, types: Types, parameter: ParameterMarkup, schema: Json, depth: int = 0) -> str:
    """The JSON of an argument, by its types and its schema; of one without tags, that of its text."""
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
    """Each key with what stands between its tags; up to what is no such thing."""
    position = 0
    while isinstance(head := parameter.head.match(text, position, final=True), Found):
        end = _end(text, head.end, head.holes["key"], parameter)
        if end is None:
            return
        close, position = end
        yield head.holes["key"], text[head.end : close]


def _end(text: str, start: int, key: str, parameter: ParameterMarkup) -> tuple[int, int] | None:
    """Where the closing tag of `key` begins and ends, past those of equal tags inside."""
    opening, closed, place = parameter.head.filled(key=key), 0, start
    while (place := text.find(parameter.close.first, place)) >= 0:
        found = parameter.close.match(text, place, final=True, known={"key": key})
        if isinstance(found, Found):
            if text.count(opening, start, place) == closed:
                return place, found.end
            closed += 1
        place += 1
    return None
