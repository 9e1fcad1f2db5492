"""Generate requests in which one field, at any depth, has a hostile value.

The fields come from the declared request types, so new fields are tested automatically.
"""

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import inspect

Path = tuple[str | int, ...]

DEEPEST = 100_000
FAR = str(2**63)
# The values are JSON texts, because Python values cannot express all of them.
HOSTILE: tuple[str, ...] = (
    *("null", "true", "false", "0", "-0", "1", "-1", "2", "1.5", "-1.5", "0.1e1", "1e-400", "NaN", "-NaN", "Infinity"),
    *(
        "-Infinity",
        "1e999",
        "-1e999",
        "1e308",
        FAR,
        f"-{FAR}",
        str(2**64),
        str(2**31),
        "9" * 400,
        f"{FAR}.5",
        "01",
        "+1",
    ),
    *(
        '""',
        '" "',
        '"a"',
        '"1"',
        '"true"',
        '"null"',
        '"NaN"',
        '"\\u0000"',
        '"a\\u0000b"',
        '"\\ud800"',
        '"\\udfff\\ud800"',
    ),
    *('"\ufffe"', '"<|im_end|>"', '"{{ 7 * 7 }}"', '"\\u202e"', '"../../etc/passwd"', '"http://127.0.0.1/"', '"$ref"'),
    *('"\\x"', '"\n"', '"', "'a'", "undefined", "", " ", ",", "}", "]", '"a" "b"', "//", "b''"),
    *(
        "[]",
        "{}",
        "[[]]",
        "[null]",
        "[{}]",
        "[1]",
        "[-1]",
        "[1e999]",
        f"[{FAR}]",
        '["a"]',
        '[""]',
        '["\\ud800"]',
        "[[1]]",
    ),
    *(
        '{"a": 1}',
        '{"": ""}',
        '{"-1": 1}',
        '{"1e3": 1}',
        f'{{"{FAR}": 1}}',
        '{"1": 1e999}',
        '{"1": 101}',
        '{"1": null}',
    ),
    *('{"a": 1, "a": 2}', '{"type": "function"}', '{"type": "text"}', '{"type": "\\u0000"}', '{"$ref": "#"}'),
    *('{"type": "object", "properties": {"a": {"$ref": "#"}}}', '{"pattern": "(a+)+$"}', '{"type": ["string", 1]}'),
    *('{"x-guidance": 1}', '{"x-guidance": {"lenient": 1}}', '{"type": "object", "x-guidance": {}}', '{"enum": []}'),
    "[" * DEEPEST + "]" * DEEPEST,
    '{"a":' * DEEPEST + "1" + "}" * DEEPEST,
    "[" * DEEPEST,
    "[" * 500 + "]" * 500,
    '{"a":' * 500 + "{}" + "}" * 500,
    json.dumps('{"a":' * 500 + "{}" + "}" * 500),
    json.dumps('{"a":' * 900 + "{}" + "}" * 900),
    '{"items":' * 200 + "{}" + "}" * 200,
    json.dumps("a" * 100_000),
    json.dumps("\0" * 10_000),
    json.dumps("\U0001f600" * 10_000),
    json.dumps([1] * 10_000),
    json.dumps(["a"] * 10_000),
    json.dumps([{}] * 10_000),
    json.dumps({str(number): 1 for number in range(10_000)}),
)


@dataclass(frozen=True, slots=True)
class Field:
    """A field: its path, and a valid request that contains it."""

    path: Path
    request: Any

    def with_value(self, value: str) -> str:
        """Return the request as JSON text, with the JSON text `value` in this field."""
        return _encoded(self.request, self.path, value)

    def twice(self, first: str, second: str) -> str:
        """Return the request as JSON text that contains this field twice, with both values."""
        if not isinstance(self.path[-1], str):
            return self.with_value(second)
        return self.with_value(f"{first}, {json.dumps(self.path[-1])}: {second}")


def fields_of(request: type[msgspec.Struct], valid: Mapping[str, Any]) -> list[Field]:
    """Return every field of a request type, each with a valid request that contains it.

    `valid` has values for the remaining top-level fields of that request.
    """
    found: dict[Path, Field] = {}
    for path, request_with in _paths(inspect.type_info(request), 0):
        found.setdefault(path, Field(path, {**request_with, **{k: v for k, v in valid.items() if k != path[0]}}))
    return list(found.values())


def _paths(kind: inspect.Type, depth: int) -> Iterator[tuple[Path, Any]]:
    """Yield every path in values of a type, with a minimal value that contains the path."""
    match kind:
        case inspect.StructType(fields=fields):
            needed = {field.encode_name: _sample(field.type) for field in fields if field.required}
            if kind.tag_field is not None:
                needed[kind.tag_field] = kind.tag
            for field in fields:
                yield (field.encode_name,), {**needed, field.encode_name: _sample(field.type)}
                for path, value in _paths(field.type, depth + 1):
                    yield (field.encode_name, *path), {**needed, field.encode_name: value}
        case inspect.ListType(item_type=item):
            yield (0,), [_sample(item)]
            for path, value in _paths(item, depth + 1):
                yield (0, *path), [value]
        case inspect.DictType(value_type=item):
            yield ("a",), {"a": _sample(item)}
            for path, value in _paths(item, depth + 1):
                yield ("a", *path), {"a": value}
        case inspect.UnionType(types=types):
            for one in types:
                yield from _paths(one, depth)


def _sample(kind: inspect.Type) -> Any:
    """Return a minimal value of a type."""
    match kind:
        case inspect.StructType(fields=fields):
            needed = {field.encode_name: _sample(field.type) for field in fields if field.required}
            return needed | ({kind.tag_field: kind.tag} if kind.tag_field is not None else {})
        case inspect.ListType(item_type=item):
            return [_sample(item)]
        case inspect.UnionType(types=types):
            return _sample(types[0])
        case inspect.LiteralType(values=values):
            return values[0]
        case inspect.IntType() | inspect.FloatType():
            return 1
        case inspect.BoolType():
            return True
        case inspect.StrType():
            return "a"
        case inspect.NoneType():
            return None
    return {}


def _encoded(value: Any, path: Path, hostile: str) -> str:
    if not path:
        return hostile
    first, rest = path[0], path[1:]
    if isinstance(first, int):
        items = [_encoded(item, rest, hostile) if at == first else json.dumps(item) for at, item in enumerate(value)]
        return f"[{', '.join(items)}]"
    items = [
        f"{json.dumps(name)}: {_encoded(item, rest, hostile) if name == first else json.dumps(item)}"
        for name, item in value.items()
    ]
    return f"{{{', '.join(items)}}}"


def hostile_bodies(fields: list[Field], count: int, chance: random.Random) -> Iterator[str]:
    """Yield `count` bodies: each field with each value once, in random order, then fields that occur twice."""
    table = [(field, value) for field in fields for value in HOSTILE]
    for field, value in chance.sample(table, min(count, len(table))):
        yield field.with_value(value)
    for _ in range(count - len(table)):
        yield chance.choice(fields).twice(chance.choice(HOSTILE), chance.choice(HOSTILE))
