"""The types that a schema gives to a tool's arguments, and the conversion of arguments from plain text to JSON.

Formats that write arguments between tags do not distinguish the number `2` from the text `2`. The schema does.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

from app.generation.conversation import Json
from app.generation.tool_parsers.relaxed_json import as_json

_UNIONS = ("anyOf", "oneOf", "allOf")
_MAX_DEPTH = 8  # maximum nesting of unions and references

Types = frozenset[str]
TEXT: Types = frozenset({"string"})


def types_in(schema: Json, root: Json) -> Types:
    """Return the types that a schema allows. `root` is the schema that contains it."""
    return frozenset(_types(schema, root if isinstance(root, Mapping) else {}, 0))


def member_schema(schema: Json, name: str) -> Json:
    """Return the schema of an object's member, or None if there is none."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties.get(name) if isinstance(properties, Mapping) else None


def _types(schema: Json, root: Mapping[str, Json], depth: int) -> Iterator[str]:
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return
    declared = schema.get("type")
    if isinstance(declared, str):
        yield declared
    elif isinstance(declared, Sequence):
        yield from (one for one in declared if isinstance(one, str))
    if schema.get("nullable") is True:
        yield "null"
    if declared is None:
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, Sequence) and not isinstance(values, str):
            yield from map(type_of, values)
    for union in _UNIONS:
        choices = schema.get(union)
        if isinstance(choices, Sequence) and not isinstance(choices, str):
            for choice in choices:
                yield from _types(choice, root, depth + 1)
    if isinstance(reference := schema.get("$ref"), str):
        yield from _types(_referred(reference, root), root, depth + 1)


def _referred(reference: str, root: Mapping[str, Json]) -> Json:
    node: Json = root if reference.startswith("#") else None
    for step in reference.split("/")[1:]:
        node = node.get(step) if isinstance(node, Mapping) else None
    return node


def type_of(value: Json) -> str:
    """Return the type of a value, as JSON Schema names it."""
    match value:
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case None:
            return "null"
        case Mapping():
            return "object"
        case _:
            return "array"


def argument_json(text: str, types: Types) -> str:
    """Return the JSON of an argument.

    It is a string if the schema allows only strings, or if the text is not valid JSON of an allowed type.
    """
    if types != TEXT:
        for written in (text.strip(), as_json(text)):
            if written is not None and (found := _value_type(written)) and _fits(found, types):
                return written
    return json.dumps(text, ensure_ascii=False)


def _value_type(written: str) -> str | None:
    try:
        return type_of(json.loads(written, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _fits(found: str, types: Types) -> bool:
    if found == "string":
        return False  # a quoted text is a string that includes the quotes
    if not types or found in types:
        return True
    return found in ("integer", "number") and bool(types & {"integer", "number"})
