"""Generate random JSON schemas like those in requests: nested objects, enums, references, patterns, arrays, unions.

All values have a maximum size, so that the reply of a small model ends.
"""

import random
from typing import Any

WORDS = ("name", "city", "year", "colour", "size", "kind", "notes", "items", "price", "unit", "größe", "is_open")
PATTERNS = ("^[A-Z]{3}-[0-9]{4}$", "^(north|south)(east|west)?$", "^[a-z]{1,8}@[a-z]{1,8}[.]com$", "^#[0-9a-f]{6}$")


def random_schema(chance: random.Random) -> dict[str, Any]:
    """Return an object schema with up to two definitions that its properties can reference."""
    definitions = {name: _part(chance, 1, ()) for name in ("first", "second")[: chance.randrange(3)]}
    schema = _object(chance, 0, tuple(definitions))
    return schema | {"$defs": definitions} if definitions else schema


def _part(chance: random.Random, depth: int, names: tuple[str, ...]) -> dict[str, Any]:
    kinds = [_string, _number, _enum, _scalar] + [_array, _object, _union] * (depth < 3)
    if names and chance.random() < 0.3:
        return {"$ref": f"#/$defs/{chance.choice(names)}"}
    return chance.choice(kinds)(chance, depth, names)


def _object(chance: random.Random, depth: int, names: tuple[str, ...]) -> dict[str, Any]:
    properties = {word: _part(chance, depth + 1, names) for word in chance.sample(WORDS, chance.randint(1, 4))}
    required = [word for word in properties if chance.random() < 0.8]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(chance: random.Random, depth: int, names: tuple[str, ...]) -> dict[str, Any]:
    least = chance.randrange(3)
    return {
        "type": "array",
        "items": _part(chance, depth + 2, names),
        "minItems": least,
        "maxItems": least + chance.randrange(3),
    }


def _union(chance: random.Random, depth: int, names: tuple[str, ...]) -> dict[str, Any]:
    return {"anyOf": [_part(chance, depth + 1, names), {"type": "null"}]}


def _string(chance: random.Random, _depth: int, _names: tuple[str, ...]) -> dict[str, Any]:
    if chance.random() < 0.4:
        return {"type": "string", "pattern": chance.choice(PATTERNS)}
    return {"type": "string", "maxLength": chance.choice((8, 40))}


def _number(chance: random.Random, _depth: int, _names: tuple[str, ...]) -> dict[str, Any]:
    least = chance.randint(-100, 100)
    return {"type": "integer", "minimum": least, "maximum": least + chance.randint(0, 1000)}


def _enum(chance: random.Random, _depth: int, _names: tuple[str, ...]) -> dict[str, Any]:
    return {"enum": chance.sample(["red", "green", "blau", 1, 2.5, None, True, 'a "b"'], chance.randint(1, 4))}


def _scalar(chance: random.Random, _depth: int, _names: tuple[str, ...]) -> dict[str, Any]:
    return {"type": chance.choice(("boolean", "null"))}
