"""Random grammars and schemas that are expensive to compile or to follow.

They contain huge numbers, circular references, nested repetitions, wide and ambiguous rules, and any of these after a
harmless start.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["json", "regex", "gbnf", "lark"]
Schema = dict[str, Any]

HUGE = (0, 1, 2, 3, 7, 50, 997, 20011, 65536, 99999999, 2**31, 2**53, 2**63, 10**18, 10**30, 10**300)
COUNTS = (0, 1, 2, 3, 5, 10, 50, 200, 1000, 5000, 100000)
ATOMS = (
    "a",
    "b",
    ".",
    "[a-z]",
    "[^x]",
    "\\d",
    "\\w",
    "\\s",
    "(?:ab|cd|ef)",
    "[^\\s\\S]",
    "\\p{L}",
    "(?i:word)",
    "ß",
    "日",
)
TIMES = ("", "", "*", "+", "?", "{1,50}", "{0,1000}", "{200}", "{3,}", "{99999}", "{1,999999999}")
REPEATED = ("", "", "", "*", "+", "?", "{2,5}", "{1,1000}", "{999999999}")


@dataclass(frozen=True, slots=True)
class Hostile:
    """A hostile grammar in the form in which a request sends it."""

    kind: Kind
    text: str


def hostile(chance: random.Random) -> Hostile:
    makers: list[tuple[int, Callable[[random.Random], Hostile]]] = [
        (8, _schema),
        (3, lambda chance: Hostile("regex", _regex(chance, 0) or "a")),
        (4, _gbnf),
        (4, _lark),
        (3, _ambiguous),
        (2, _product),
    ]
    weights, choices = [weight for weight, _ in makers], [make for _, make in makers]
    [make] = chance.choices(choices, weights)
    return make(chance)


def _schema(chance: random.Random) -> Hostile:
    names = [f"d{number}" for number in range(chance.randrange(4))]
    schema = _part(chance, 0, names)
    if names:
        schema = {**schema, "$defs": {name: _part(chance, 1, names) for name in names}}
    return Hostile("json", json.dumps(schema))


def _part(chance: random.Random, depth: int, names: list[str]) -> Schema:
    if names and chance.random() < 0.3:
        return {"$ref": chance.choice([f"#/$defs/{chance.choice(names)}", "#"])}
    kinds = [_number, _string, _array, _object, _enum]
    if depth < 4:
        kinds += [_combination, _combination, _wide, _array, _object]
    return chance.choice(kinds)(chance, depth, names)


def _with_some(chance: random.Random, schema: Schema, keys: tuple[str, ...], values: tuple[int, ...] = HUGE) -> Schema:
    return schema | {key: chance.choice(values) for key in keys if chance.random() < 0.4}


def _number(chance: random.Random, depth: int, names: list[str]) -> Schema:
    keys = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
    schema = _with_some(chance, {"type": chance.choice(["integer", "number"])}, keys)
    for key in schema.keys() & set(keys):
        if chance.random() < 0.3:
            value = schema[key]
            schema[key] = chance.choice([-value, value * 0.37 if value < 1e200 else 1e-300, chance.random(), 1e-9])
    return schema


def _string(chance: random.Random, depth: int, names: list[str]) -> Schema:
    schema = _with_some(chance, {"type": "string"}, ("minLength", "maxLength"))
    if chance.random() < 0.5:
        schema["pattern"] = _regex(chance, 0)
    if chance.random() < 0.2:
        schema["format"] = chance.choice(["date-time", "uri", "email", "ipv6", "hostname", "uuid", "duration", "regex"])
    return schema


def _array(chance: random.Random, depth: int, names: list[str]) -> Schema:
    schema = _with_some(chance, {"type": "array"}, ("minItems", "maxItems"))
    if depth < 6:
        if chance.random() < 0.8:
            schema["items"] = _part(chance, depth + 1, names)
        if chance.random() < 0.2:
            schema["prefixItems"] = [_part(chance, depth + 1, names) for _ in range(chance.choice((1, 2, 30)))]
    return schema | ({"uniqueItems": True} if chance.random() < 0.05 else {})


def _object(chance: random.Random, depth: int, names: list[str]) -> Schema:
    schema: Schema = {"type": "object"}
    if depth < 6:
        count = chance.choice((0, 1, 2, 5, 20))
        schema["properties"] = {f"p{number}": _part(chance, depth + 2, names) for number in range(count)}
        schema["required"] = [name for name in schema["properties"] if chance.random() < 0.5]
        if chance.random() < 0.2:
            patterns = [_regex(chance, 1) for _ in range(chance.choice((1, 2, 5)))]
            schema["patternProperties"] = {pattern: _part(chance, depth + 2, names) for pattern in patterns}
        if chance.random() < 0.3:
            schema["additionalProperties"] = chance.choice([True, False, _part(chance, depth + 2, names)])
    return _with_some(chance, schema, ("minProperties", "maxProperties") if chance.random() < 0.2 else (), COUNTS)


def _enum(chance: random.Random, depth: int, names: list[str]) -> Schema:
    makers: list[Callable[[int], Any]] = [str, int, lambda it: it * 1e10, lambda it: [it], lambda it: {"a": it}]
    return {"enum": [chance.choice(makers)(number) for number in range(chance.choice((0, 1, 10, 3000)))]}


def _combination(chance: random.Random, depth: int, names: list[str]) -> Schema:
    parts = [_part(chance, depth + 1, names) for _ in range(chance.choice((0, 1, 2, 3, 8)))]
    return {chance.choice(["anyOf", "oneOf", "allOf"]): parts}


def _wide(chance: random.Random, depth: int, names: list[str]) -> Schema:
    count = chance.choice((30, 300, 3000))
    key = chance.choice(["properties", "anyOf", "allOf", "prefixItems"])
    if key == "properties":
        members = {f"p{number}": chance.choice([_number, _string])(chance, 9, []) for number in range(count)}
        return {"type": "object", "properties": members}
    return {key: [chance.choice([_number, _string])(chance, 9, []) for _ in range(min(count, 300))]}


def _regex(chance: random.Random, depth: int) -> str:
    parts = []
    for _ in range(chance.randint(1, 5)):
        nests = depth <= 4 and chance.random() < 0.6
        parts.append((f"({_regex(chance, depth + 1)})" if nests else chance.choice(ATOMS)) + chance.choice(TIMES))
    return chance.choice(["", "", "|", "|.*"]).join(parts)


def _gbnf(chance: random.Random) -> Hostile:
    rules = ["root", *(f"r{number}" for number in range(chance.choice((1, 3, 10, 60))))]
    return Hostile("gbnf", "\n".join(f"{rule} ::= {_alternatives(chance, rules, 'gbnf')}" for rule in rules))


def _lark(chance: random.Random) -> Hostile:
    rules = ["start", *(f"r{number}" for number in range(chance.choice((1, 3, 10, 60))))]
    terminals = [f"T{number}" for number in range(chance.randrange(4))]
    lines = [f"{rule}: {_alternatives(chance, rules + terminals, 'lark')}" for rule in rules]
    for terminal in terminals:
        more = chance.choice(["", " & /[a-z]*/", " & ~/(?s:.*)ab(?s:.*)/", "+", ' | "q"'])
        lines.append(f"{terminal}: /{_regex(chance, 1) or 'x'}/{more}")
    if chance.random() < 0.3:
        lines.append("%ignore /[ \\n]+/")
    if chance.random() < 0.2:
        lines.append(f"extra: %json {json.dumps(_part(chance, 2, []))}")
    return Hostile("lark", "\n".join(lines))


def _alternatives(chance: random.Random, rules: list[str], kind: Kind) -> str:
    return " | ".join(_sequence(chance, rules, kind) for _ in range(chance.randint(1, 4)))


def _sequence(chance: random.Random, rules: list[str], kind: Kind) -> str:
    words = []
    for _ in range(chance.choice((1, 1, 2, 3, 6))):
        word = chance.choice(['"a"', '"b"', '"xy"', '""', "class", "rule", "rule", "group"])
        if word == "class":
            word = chance.choice(["[a-z]", "[^\\n]", "[0-9]"])
            word = word if kind == "gbnf" else f"/{word}{chance.choice(['', '+', '*x'])}/"
        elif word == "rule":
            word = chance.choice(rules[1:])
        elif word == "group":
            word = f'({chance.choice(rules)} | "z")'
        words.append(word + chance.choice(REPEATED))
    return " ".join(words)


def _ambiguous(chance: random.Random) -> Hostile:
    """Return rules that start and end with each other, so that one mask takes minutes, mostly after some text."""
    count = chance.choice((30, 100, 300, 1000))
    body = chance.choice(['wide? "y" wide?', 'wide? wide? "y"', '("y" | "z") wide?', '"y"? wide? "z"?'])
    beginning = chance.choice(['"a"', "[a-z ]{20}", "[a-z ]{60}", "[A-Z]{300}"])
    rules = [f'wide ::= {" | ".join(f"r{number}" for number in range(count))} | "q"']
    rules += [f"r{number} ::= {body}" for number in range(count)]
    return Hostile("gbnf", "\n".join([f'root ::= {beginning} "q" wide', *rules]))


def _product(chance: random.Random) -> Hostile:
    """Return a schema with many combinations: an intersection of unions, or arrays that differ only at their end."""
    count = chance.choice((3, 10, 100, 1000))
    if chance.random() < 0.5:
        union = [{"type": "object", "properties": {f"p{number}": {"const": number}}} for number in range(count)]
        return Hostile("json", json.dumps({"allOf": [{"anyOf": union} for _ in range(chance.choice((2, 4, 8)))]}))
    own = [{"type": "array", "prefixItems": [{"const": number}], "minItems": 1} for number in range(count)]
    branches = [{"type": "array", "prefixItems": [{"$ref": "#"}, {"$ref": "#"}, it], "items": False} for it in own]
    return Hostile("json", json.dumps({"anyOf": branches}))
