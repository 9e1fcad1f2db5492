"""Grammars over the vocabulary of a real model: whoever keeps to the masks writes what was asked for."""

import asyncio
import json
import random
import re
from collections.abc import Callable

import jsonschema  # type: ignore[import-untyped]
import numpy as np
import pytest

from app.chat.grammars import ANY_OBJECT, MAX_SOURCE, GrammarCompiler, GrammarSource
from app.chat.messages import Json
from app.errors import InvalidGrammar
from app.text.tokenizer import Tokenizer
from engine.constraint import Grammar

PERSON: dict[str, Json] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "é"]}, "minItems": 1, "maxItems": 3},
        "next": {"anyOf": [{"$ref": "#/$defs/short"}, {"type": "null"}]},
    },
    "required": ["name", "age", "tags", "next"],
    "additionalProperties": False,
    "$defs": {"short": {"type": "string", "pattern": "^[a-f]{2,4}$"}},
}


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer)


def compiled(compiler: GrammarCompiler, source: GrammarSource) -> Grammar:
    return asyncio.run(compiler.compile(source))


def written(compiler: GrammarCompiler, tokenizer: Tokenizer, source: GrammarSource, *, jumps: bool) -> str:
    """What somebody writes who knows nothing but the masks."""
    chance, constraint = random.Random(), compiled(compiler, source).begin(jumps=jumps)
    ids: list[int] = []
    while not constraint.ended and len(ids) < 400:
        words = np.zeros(-(-(tokenizer.vocab_size + 64) // 32), np.int32)
        assert constraint.fill(words)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        assert allowed[-1] < tokenizer.vocab_size
        token_id = int(chance.choice(allowed))
        if token_id in tokenizer.end_of_generation_ids:
            break
        ids += [token_id, *constraint.accept(token_id)]
    return tokenizer.decode(ids, continues_text=True)


@pytest.mark.parametrize("jumps", [False, True])
def test_a_schema_is_kept(compiler: GrammarCompiler, tokenizer: Tokenizer, jumps: bool) -> None:
    for _ in range(8):
        text = written(compiler, tokenizer, GrammarSource.schema(PERSON), jumps=jumps)
        jsonschema.validate(json.loads(text), PERSON)


def test_a_regular_expression_and_a_choice_are_kept(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    pattern = r"[A-Z]{2}-[0-9]{3,5}(, [a-z]{1,9}ß)?"
    choices = ['yes "indeed"', "no\nnever", "日本"]
    grammar = GrammarSource("lark", 'start: "(" NUMBER ")" | "[" start "]"\nNUMBER: /[0-9]{1,3}/')
    for _ in range(8):
        assert re.fullmatch(pattern, written(compiler, tokenizer, GrammarSource("regex", pattern), jumps=True))
        assert written(compiler, tokenizer, GrammarSource.choice(choices), jumps=True) in choices
        assert re.fullmatch(r"\[*\(\d{1,3}\)\]*", written(compiler, tokenizer, grammar, jumps=True))


def test_what_must_follow_is_said(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    constraint = compiled(compiler, GrammarSource.choice(["alphabetically sorted", "numbered"])).begin(jumps=True)
    (first,) = tokenizer.encode_plain("alpha", at_start=False)
    assert tokenizer.decode(constraint.accept(first), continues_text=True) == "betically sorted"
    assert constraint.ended


def test_other_vocabularies_keep_it_too(vocabularies: Callable[[str], Tokenizer]) -> None:
    for name in ("llama-spm", "qwen2"):
        tokenizer = vocabularies(name)
        compiler = GrammarCompiler(tokenizer)
        jsonschema.validate(json.loads(written(compiler, tokenizer, GrammarSource.schema(PERSON), jumps=True)), PERSON)


@pytest.mark.parametrize(
    ("schema", "place", "problem"),
    [
        ({"type": "strong"}, "", "strong"),
        (
            {"properties": {"a": {"type": "object", "properties": {"b": {"not": {}}}}}},
            ".properties.a.properties.b",
            "not",
        ),
        ({"anyOf": [{"type": "null"}, {"$ref": "#/nowhere"}]}, ".anyOf[1]", "nowhere"),
        ({"items": {"$ref": "#/$defs/x"}, "$defs": {"x": {"pattern": "(a"}}}, ".$defs.x", "unclosed"),
    ],
)
def test_a_bad_schema_is_refused_with_the_place(
    compiler: GrammarCompiler, schema: dict[str, Json], place: str, problem: str
) -> None:
    with pytest.raises(InvalidGrammar, match=problem) as refused:
        compiled(compiler, GrammarSource.schema(schema))
    assert refused.value.place == place


@pytest.mark.parametrize("lenient", [False, True])
def test_the_schemas_of_anything_and_of_nothing(compiler: GrammarCompiler, lenient: bool) -> None:
    words = np.zeros(2000, np.int32)
    assert compiled(compiler, GrammarSource.schema(True, lenient=lenient)).begin(jumps=False).fill(words)
    assert words.any()
    with pytest.raises(InvalidGrammar):
        compiled(compiler, GrammarSource.schema(False, lenient=lenient))


def test_keywords_that_cannot_be_kept_are_ignored_where_that_was_asked_for(compiler: GrammarCompiler) -> None:
    compiled(compiler, GrammarSource.schema({"type": "object", "not": {"required": ["a"]}}, lenient=True))


def test_what_is_too_large_is_refused(compiler: GrammarCompiler) -> None:
    deep: Json = {"type": "string"}
    for _ in range(100):
        deep = {"items": deep}
    with pytest.raises(InvalidGrammar, match="deeper than"):
        GrammarSource.schema(deep)
    with pytest.raises(InvalidGrammar, match="characters"):
        compiled(compiler, GrammarSource("regex", "a" * (MAX_SOURCE + 1)))


def test_a_grammar_is_compiled_once_and_forgotten_after_many_others(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.chat.grammars.REMEMBERED", 5)  # each is compiled for all tokens
    compiler = GrammarCompiler(tokenizer)
    first = compiled(compiler, ANY_OBJECT)
    assert compiled(compiler, ANY_OBJECT) is first
    for number in range(5):
        compiled(compiler, GrammarSource("regex", f"a{{{number + 1}}}"))
    assert compiled(compiler, ANY_OBJECT) is not first
