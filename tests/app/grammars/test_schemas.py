"""Schemas are enforced, or refused with the keyword and its path."""

import json
import random
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from app.grammars.compiling import Compiler
from app.grammars.frames import GrammarProblem, GrammarText
from app.grammars.process import bytes_tokenizer
from app.grammars.schema_keywords import Json
from app.grammars.schemas import enforceable
from tests.app.grammars.combined_schemas import closed, combined_schema

TEXT = {"type": "string"}


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(bytes_tokenizer(), bytes_tokenizer())


def rewritten(schema: Json, *, lenient: bool = False) -> Json:
    return enforceable(schema, lambda leaf: None, lenient=lenient)


def members(*names: str, **more: Any) -> dict[str, Any]:
    """Return a schema of an object with these members, all required."""
    return {"type": "object", "properties": dict.fromkeys(names, TEXT), "required": [*names], **more}


def written(compiler: Compiler, schema: Json, chance: random.Random) -> str:
    """Return a random text that a schema allows, written byte by byte."""
    matcher = compiler.compile(GrammarText("json", json.dumps(schema), whitespace=None))
    text = bytearray()
    while not matcher.is_stopped():
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [token for token in range(256) if mask >> token & 1]
        if not allowed or (matcher.is_accepting() and chance.random() < 0.5):
            break
        token = chance.choice(chance.choice([allowed, [one for one in allowed if chr(one) in '"}],'] or allowed]))
        assert matcher.consume_token(token)
        text.append(token)
        assert len(text) < 5000
    return text.decode()


def allows(compiler: Compiler, schema: Json, value: Any) -> bool:
    """Whether the enforced schema allows a value."""
    matcher = compiler.compile(GrammarText("json", json.dumps(schema), whitespace=None))
    text = json.dumps(value, separators=(",", ":")).encode()
    return matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting()


@pytest.mark.share(10)
@pytest.mark.parametrize("seed", range(200))
def test_replies_match_combined_schemas(compiler: Compiler, seed: int) -> None:
    chance = random.Random(seed)
    schema = combined_schema(chance)
    check = jsonschema.Draft202012Validator(closed(schema))
    for _ in range(5):
        text = written(compiler, schema, chance)
        assert not [error.message for error in check.iter_errors(json.loads(text))], (schema, text)


@pytest.mark.parametrize(
    ("schema", "allowed", "forbidden"),
    [
        ({"properties": {"a": TEXT}}, [{}, {"a": "x"}], [{"b": 1}, [], 1]),
        ({"type": "object", "required": ["a"]}, [{"a": [1]}], [{}, {"a": 1, "b": 1}]),
        ({"type": "object", "properties": {}}, [{}], [{"a": 1}]),
        ({"type": "object"}, [{}, {"a": {"b": 1}}], [[]]),
        (members("a", additionalProperties=True), [{"a": "x", "b": 1}], [{"b": 1}]),
        (members("a", additionalProperties=TEXT), [{"a": "x", "b": "y"}], [{"a": "x", "b": 1}]),
        (members("a", patternProperties={"^b": TEXT}), [{"a": "x", "b": "y"}], [{"b": "y"}]),
        ({"type": "array", "items": members("a")}, [[], [{"a": "x"}]], [[{"a": "x", "b": 1}]]),
        ({"type": ["object", "null"], "properties": {"a": TEXT}}, [None, {}], [{"b": 1}, "x"]),
        ({"allOf": [members("a"), members("b")]}, [{"a": "x", "b": "y"}], [{"a": "x"}, {"a": "x", "b": "y", "c": 1}]),
        (
            {"allOf": [{"$ref": "#/$defs/a"}], "properties": {"b": TEXT}, "$defs": {"a": members("a")}},
            [{"a": "x"}, {"a": "x", "b": "y"}],
            [{"b": "y"}, {"a": "x", "c": 1}],
        ),
        (
            {"$ref": "#/$defs/a", "required": ["b"], "properties": {"b": TEXT}, "$defs": {"a": members("a")}},
            [{"a": "x", "b": "y"}],
            [{"a": "x"}, {"a": "x", "b": "y", "c": 1}],
        ),
        (
            {"anyOf": [members("a"), members("b")], "type": "object"},
            [{"a": "x"}, {"b": "x"}],
            [{}, {"a": "x", "b": "y"}, {"a": "x", "c": "y"}],
        ),
        (
            members("k", anyOf=[members("a"), {"required": ["b"]}]),
            [{"k": "x", "a": "y"}, {"k": "x", "b": 1}],
            [{"k": "x"}, {"a": "y"}, {"k": "x", "a": "y", "c": 1}],
        ),
        (
            {"allOf": [{"properties": {"in": members("a")}}, {"properties": {"in": members("b")}}], "required": ["in"]},
            [{"in": {"a": "x", "b": "y"}}],
            [{"in": {"a": "x"}}, {}],
        ),
        (
            {"allOf": [members("a")], "properties": {"b": TEXT}, "unevaluatedProperties": False},
            [{"a": "x", "b": "y"}],
            [{"a": "x", "c": 1}],
        ),
        (
            {"allOf": [members("a", additionalProperties=True), members("b")]},
            [{"a": "x", "b": "y", "c": 1}],
            [{"a": "x"}],
        ),
        (
            {"oneOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}], "discriminator": {"propertyName": "t"},
             "$defs": {tag: {"properties": {"t": {"const": tag}, tag: TEXT}, "required": ["t"]} for tag in "xy"}},
            [{"t": "x"}, {"t": "x", "x": "a"}, {"t": "y", "y": "b"}],
            [{"t": "x", "y": "b"}, {"t": "z"}, {}],
        ),
        ({"oneOf": [members("a"), members("b")]}, [{"a": "x"}, {"b": "x"}], [{"a": "x", "b": "x"}]),
        ({"oneOf": [{"type": "null"}, TEXT, {"type": "number"}]}, [None, "x", 1.5], [[], True]),
        ({"oneOf": [{"enum": [1, "a"]}, {"const": True}]}, [1, "a", True], [2, False]),
        ({"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": TEXT}, [{}, {"a": "x"}], [{"c": "x"}]),
        ({"propertyNames": {"pattern": "^a+$"}, "additionalProperties": TEXT}, [{"aa": "x"}], [{"b": "x"}, {"a": 1}]),
        ({"propertyNames": TEXT, "additionalProperties": {"type": "null"}}, [{"b": None}], [{"a": 1}]),
        (
            {"propertyNames": {"$ref": "#/$defs/n"}, "type": "object", "$defs": {"n": {"enum": ["a"]}}},
            [{"a": [1]}],
            [{"b": 1}],
        ),
        (members("a", minProperties=1, maxProperties=5), [{"a": "x"}], [{}]),
        ({"properties": {"a": TEXT, "b": TEXT}, "minProperties": 1}, [{"a": "x"}, {"a": "x", "b": "y"}], [{}]),
        (
            {"properties": {"a": TEXT, "b": TEXT}, "required": ["a"], "maxProperties": 1},
            [{"a": "x"}],
            [{"a": "x", "b": "y"}],
        ),
        ({"items": [TEXT, {"type": "null"}], "additionalItems": False}, [["x", None], []], [["x", None, 1], [1]]),
        ({"prefixItems": [TEXT], "items": {"type": "null"}}, [["x"], ["x", None]], [["x", "y"]]),
        ({"prefixItems": [TEXT], "unevaluatedItems": False}, [["x"]], [["x", "y"]]),
        ({"type": "array", "uniqueItems": False, "maxItems": 2}, [[1, 1]], [[1, 1, 1]]),
        ({"minimum": 1, "exclusiveMaximum": 3}, [1, 2.5], [3, 0, "x"]),
        ({"type": "integer", "minimum": 0, "exclusiveMinimum": True}, [1], [0, -1]),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, [0, -5, 10**18], [1.5]),
        ({"type": "integer", "minimum": 2**53 + 1}, [2**53 + 2], [2**53]),
        ({"type": "number", "minimum": -1e300, "maximum": 1e300}, [0, 1e9], ["x"]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, [0.5, 1], [0, 1.5]),
        ({"pattern": "^a+$"}, ["aa"], ["b", 1]),
        ({"type": "string", "format": "date"}, ["2024-02-29"], ["today"]),
        ({"type": "string", "format": "file-path", "nullable": True, "x-order": 1, "strict": True}, ["any"], [None]),
        ({"anyOf": [{"$ref": "#/$defs/loop"}, TEXT], "$defs": {"loop": {"$ref": "#/$defs/loop"}}}, ["x"], [1, {}]),
        ({"properties": {"a": {"$ref": "#"}}}, [{}, {"a": {"a": {}}}], [{"b": 1}]),
        ({"$ref": "#name", "$defs": {"x": {"$anchor": "name", "const": 1}}}, [1], [2]),
        ({"$id": "http://a/b", "items": {"$ref": "http://a/b#/$defs/x"}, "$defs": {"x": {"const": 1}}}, [[1]], [[2]]),
        ({"items": {"$ref": "#/$defs/a~1b%25"}, "$defs": {"a/b%": {"const": 1}}}, [[1]], [[2]]),
        ({"enum": [False]}, [False], [True]),
        ({"const": {"a": {"$ref": "x"}}}, [{"a": {"$ref": "x"}}], [{}]),
    ],
)  # fmt: skip
def test_keywords_are_enforced(compiler: Compiler, schema: Json, allowed: list[Any], forbidden: list[Any]) -> None:
    assert [value for value in allowed if not allows(compiler, schema, value)] == []
    assert [value for value in forbidden if allows(compiler, schema, value)] == []


REFUSED: list[tuple[Json, str, str]] = [
    ({"type": "array", "uniqueItems": True}, ".uniqueItems", "uniqueItems cannot be enforced"),
    ({"properties": {"a": {"not": {"type": "null"}}}}, ".properties.a.not", "not cannot be enforced"),
    ({"items": {"contains": {"const": 1}}}, ".items.contains", "contains cannot be enforced"),
    ({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, ".if", "if cannot be enforced"),
    ({"dependentRequired": {"a": ["b"]}}, ".dependentRequired", "cannot be enforced"),
    ({"dependentSchemas": {"a": {}}}, ".dependentSchemas", "cannot be enforced"),
    ({"dependencies": {"a": ["b"]}}, ".dependencies", "cannot be enforced"),
    ({"anyOf": [TEXT, {"$dynamicRef": "#x"}]}, ".anyOf[1].$dynamicRef", "cannot be enforced"),
    ({"type": "object", "propertyNames": {"maxLength": 3}}, ".propertyNames", "patternProperties"),
    ({"properties": {"a": TEXT, "b": TEXT}, "minProperties": 2}, ".minProperties", "all members are required"),
    ({"type": "string", "format": "regex"}, ".format", "The format regex cannot be enforced"),
    ({"oneOf": [TEXT, {"type": "string", "maxLength": 3}]}, ".oneOf", "Use anyOf"),
    ({"oneOf": [members(name, additionalProperties=True) for name in "ab"]}, ".oneOf", "Use anyOf"),
    ({"type": "integer", "multipleOf": 99999999}, ".multipleOf", "too many digits"),
    ({"const": 2**53 + 1}, ".const", "2\\*\\*53"),
    ({"enum": [1, {"a": [2**60 + 1]}]}, ".enum", "2\\*\\*53"),
    ({"$ref": "https://example.com/schema"}, ".$ref", "another document"),
    ({"items": {"$ref": "#/$defs/none"}}, ".items.$ref", "not defined"),
    ({"type": "strong"}, ".type", '"strong"'),
    ({"properties": {"a": {"minLength": -1}}}, ".properties.a.minLength", "at least 0, not -1"),
    ({"required": "a"}, ".required", "a list of strings"),
    ({"multipleOf": 0}, ".multipleOf", "not 0"),
    ({"minimum": True}, ".minimum", "must be a number"),
    ({"properties": {"a": 1}}, ".properties", "members are schemas"),
    ({"allOf": [members("a")], "unevaluatedProperties": TEXT}, ".unevaluatedProperties", "in combination"),
    (members("k", anyOf=[members("a")], oneOf=[members("b")], unevaluatedProperties=False), ".unevaluatedProperties",
     "additionalProperties"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "path", "problem"), REFUSED)
def test_unenforceable_keywords_are_refused_with_their_path(schema: Json, path: str, problem: str) -> None:
    with pytest.raises(GrammarProblem, match=problem) as refused:
        rewritten(schema)
    assert refused.value.path == path
    assert refused.value.message.endswith(".")


@pytest.mark.parametrize("schema", [schema for schema, _, _ in REFUSED])
def test_lenient_schemas_drop_unenforceable_keywords(schema: Json, compiler: Compiler) -> None:
    compiler.compile(GrammarText("json", json.dumps(schema), lenient=True))


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"$ref": "#"}, ""),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, ""),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, ""),
        ({"allOf": [{"properties": {"a": {"$ref": "#"}}, "type": "object"}, {"required": ["a"]}]}, ""),
        ({"type": "array", "minItems": 1, "items": {"$ref": "#"}}, ""),
        ({"anyOf": [{"$ref": "#"}, {"type": "array", "items": {"$ref": "#"}, "minItems": 2}]}, ""),
        ({"enum": []}, ".enum"),
        ({"properties": {"a": {"enum": []}}, "required": ["a"]}, ".properties.a.enum"),
        ({"type": "string", "pattern": r"[^\s\S]"}, ".pattern"),
        ({"items": {"type": "string", "pattern": "^a$", "minLength": 2}, "minItems": 1}, ".items.pattern"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, ".maxLength"),
        ({"type": "integer", "minimum": 5, "maximum": 4}, ""),
        ({"type": "integer", "minimum": 1, "maximum": 9, "multipleOf": 10}, ".multipleOf"),
        ({"properties": {"a": TEXT}, "required": ["b"], "additionalProperties": False}, ""),
        ({"anyOf": []}, ""),
    ],
)
def test_schema_without_finite_value_is_refused(compiler: Compiler, schema: Json, path: str) -> None:
    with pytest.raises(GrammarProblem, match=r"[Nn]o .*(match|between)") as refused:
        compiler.compile(GrammarText("json", json.dumps(schema)))
    assert refused.value.path == path


def test_invalid_pattern_is_refused_with_its_path(compiler: Compiler) -> None:
    schema = {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"type": "string", "pattern": "(a"}}}
    with pytest.raises(GrammarProblem, match="unclosed group") as refused:
        compiler.compile(GrammarText("json", json.dumps(schema)))
    assert refused.value.path == ".$defs.x.pattern"


def test_members_keep_the_order_of_the_schema(compiler: Compiler) -> None:
    schema = {"allOf": [members("z")], **members("m"), "$defs": {}}
    assert allows(compiler, schema, {"z": "1", "m": "2"})
    assert not allows(compiler, schema, {"m": "2", "z": "1"})


def test_rewriting_is_deterministic() -> None:
    schemas = [combined_schema(random.Random(seed)) for seed in range(20)]
    assert [json.dumps(rewritten(it)) for it in schemas] == [json.dumps(rewritten(it)) for it in schemas]


def test_many_tagged_alternatives_are_disjoint() -> None:
    branches: list[Json] = [{"properties": {"t": {"const": f"t{number}"}}, "required": ["t"]} for number in range(300)]
    assert isinstance(rewritten({"oneOf": branches}), dict)
    with pytest.raises(GrammarProblem, match="Use anyOf"):
        rewritten({"oneOf": [*branches, branches[7]]})
