"""Random JSON schemas of objects that are combined by references, allOf, anyOf, and oneOf.

All values are bounded, so that every text that follows a schema ends.
"""

import random
from typing import Any

from tests.app.server.random_schemas import random_schema

Schema = dict[str, Any]


def combined_schema(chance: random.Random) -> Schema:
    """Return a schema of an object, with definitions for its parts."""
    definitions = {name: _named(chance, name) for name in ("first", "second", "third")}
    return _value(chance, 0) | {"$defs": definitions}


def _named(chance: random.Random, prefix: str) -> Schema:
    """Return a schema of an object whose members have unique names."""
    members = {f"{prefix}_{number}": _leaf(chance) for number in range(chance.randint(1, 3))}
    required = [name for name in members if chance.random() < 0.6]
    return {"type": "object", "properties": members, **({"required": required} if required else {})}


def _leaf(chance: random.Random) -> Schema:
    return chance.choice(
        [
            {"type": "string", "maxLength": 5},
            {"type": ["integer", "null"], "minimum": 1, "maximum": 9},
            {"type": "boolean"},
            {"const": "fixed"},
            {"enum": [1, "two", None]},
        ]
    )


def _value(chance: random.Random, depth: int) -> Schema:
    kinds = [_together, _alternatives, _tagged, _one_required, _reference, _plain]
    return chance.choice(kinds if depth < 2 else [_plain, _reference, _leaf_at])(chance, depth)


def _leaf_at(chance: random.Random, _depth: int) -> Schema:
    return _leaf(chance)


def _reference(chance: random.Random, _depth: int) -> Schema:
    return {"$ref": f"#/$defs/{chance.choice(('first', 'second', 'third'))}", "description": "of another object"}


def _plain(chance: random.Random, depth: int) -> Schema:
    if chance.random() < 0.3:
        return {key: value for key, value in random_schema(chance).items() if key != "$defs"} | _without_references(
            chance
        )
    members = {f"own_{number}": _value(chance, depth + 1) for number in range(chance.randint(1, 2))}
    return {"type": "object", "properties": members, "required": list(members)[: chance.randrange(3)]}


def _without_references(chance: random.Random) -> Schema:
    return {"properties": {"name": _leaf(chance)}, "required": []}


def _together(chance: random.Random, depth: int) -> Schema:
    parts = chance.sample([_reference(chance, depth), _named(chance, "a"), _named(chance, "b")], chance.randint(1, 3))
    return {"allOf": parts, **(_named(chance, "own") if chance.random() < 0.5 else {})}


def _alternatives(chance: random.Random, depth: int) -> Schema:
    union = {"anyOf": [_named(chance, "a"), _value(chance, depth + 1), {"type": "null"}][: chance.randint(1, 3)]}
    return union | (_named(chance, "own") if chance.random() < 0.3 and depth else {})


def _tagged(chance: random.Random, _depth: int) -> Schema:
    branches = []
    for tag in ("x", "y"):
        branch = _named(chance, tag)
        branch["properties"]["tag"] = {"const": tag}
        branch["required"] = [*branch.get("required", ()), "tag"]
        branches.append(branch)
    return {"oneOf": branches, "discriminator": {"propertyName": "tag"}}


def _one_required(chance: random.Random, _depth: int) -> Schema:
    schema = _named(chance, "own")
    return schema | {"anyOf": [{"required": [name]} for name in schema["properties"]]}


def closed(schema: Any) -> Any:
    """Return the schema as it is enforced: objects allow only the members that are described."""
    if not isinstance(schema, dict):
        return schema
    out = {key: _closed_within(key, value) for key, value in schema.items()}
    if _describes_members(schema) and not schema.keys() & {"additionalProperties", "patternProperties"}:
        out["unevaluatedProperties"] = False
    return out


def _closed_within(key: str, value: Any) -> Any:
    if key in ("properties", "$defs"):
        return {name: (closed if key == "properties" else _opened)(part) for name, part in value.items()}
    if key == "items":
        return closed(value)
    if key in ("allOf", "anyOf", "oneOf"):
        return [_opened(part) for part in value]
    return value


def _opened(schema: Any) -> Any:
    """Close the schemas of an object's members. The object itself stays open, because it is part of another schema."""
    return {key: _closed_within(key, value) for key, value in schema.items()}


def _describes_members(schema: Any) -> bool:
    return any(key in schema for key in ("properties", "required", "allOf", "anyOf", "oneOf", "$ref"))
