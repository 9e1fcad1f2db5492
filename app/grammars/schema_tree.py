"""Rewritten schemas as trees: functions to list and to replace the direct subschemas of a schema."""

from collections.abc import Callable, Iterator, Mapping

from app.grammars.schema_keywords import Json, is_list, list_in

DEFINITION = "#/$defs/"

_ONE = ("items", "additionalProperties")
_SEVERAL = ("allOf", "anyOf", "oneOf", "prefixItems")
_NAMED = ("properties", "patternProperties")


def parts_of(schema: Json) -> Iterator[Json]:
    """Yield the direct subschemas of a schema."""
    if isinstance(schema, Mapping):
        for key, value in schema.items():
            if key in _ONE:
                yield value
            elif key in _SEVERAL and is_list(value):
                yield from value
            elif key in _NAMED and isinstance(value, Mapping):
                yield from value.values()


def mapped(schema: Json, change: Callable[[Json], Json]) -> Json:
    """Return the schema with `change` applied to its direct subschemas."""
    if not isinstance(schema, Mapping):
        return schema
    changed: dict[str, Json] = {}
    for key, value in schema.items():
        if key in _ONE:
            changed[key] = change(value)
        elif key in _SEVERAL and is_list(value):
            changed[key] = [change(part) for part in value]
        elif key in _NAMED and isinstance(value, Mapping):
            changed[key] = {name: change(part) for name, part in value.items()}
        else:
            changed[key] = value
    return changed


def definition_of(schema: Json) -> str | None:
    """Return the name of the definition that a schema refers to, or None."""
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    return reference.removeprefix(DEFINITION) if isinstance(reference, str) else None


def conjuncts(schema: Json, definitions: Mapping[str, Json]) -> Iterator[Json]:
    """Yield the schema and each schema that it requires through `allOf` and `$ref`. Each definition is yielded once."""
    left, seen = [schema], set[str]()
    while left:
        part = left.pop()
        name = definition_of(part)
        if name is not None and name not in seen:
            seen.add(name)
            left.append(definitions[name])
        if isinstance(part, Mapping):
            left += list_in(part, "allOf")
        yield part


def reachable(root: Json, definitions: Mapping[str, Json]) -> set[str]:
    """Return the names of the definitions that a schema uses."""
    found: set[str] = set()
    left = [root]
    while left:
        part = left.pop()
        name = definition_of(part)
        if name is not None and name not in found:
            found.add(name)
            left.append(definitions[name])
        left += parts_of(part)
    return found
