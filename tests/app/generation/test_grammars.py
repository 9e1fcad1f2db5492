"""Grammars with a real model's vocabulary: random replies that the masks allow match the grammar."""

import asyncio
import gc
import json
import random
import re
import threading
import weakref
from collections.abc import Callable

import jsonschema  # type: ignore[import-untyped]
import numpy as np
import pytest

from app.errors import GrammarsUnavailable, InvalidGrammar
from app.generation.conversation import Json
from app.generation.grammars import ANY_OBJECT, MAX_SOURCE, GrammarCompiler, GrammarSource, vocabulary_of
from app.grammars.frames import GrammarLimits
from app.grammars.process_streams import ProcessStarter, ProcessStream
from app.text.tokenizer import Tokenizer
from engine.grammar import Grammar
from tests.support.processes import HANGING_SECONDS

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


def random_reply(
    compiler: GrammarCompiler, tokenizer: Tokenizer, source: GrammarSource, chance: random.Random, *, jumps: bool
) -> str:
    """Return a reply of random tokens that the masks allow."""
    constraint = compiled(compiler, source).start(jumps=jumps)
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
def test_replies_match_the_schema(
    compiler: GrammarCompiler, tokenizer: Tokenizer, chance: random.Random, jumps: bool
) -> None:
    for _ in range(8):
        text = random_reply(compiler, tokenizer, GrammarSource.schema(PERSON), chance, jumps=jumps)
        jsonschema.validate(json.loads(text), PERSON)


def test_replies_match_a_regular_expression_or_choice(
    compiler: GrammarCompiler, tokenizer: Tokenizer, chance: random.Random
) -> None:
    pattern = r"[A-Z]{2}-[0-9]{3,5}(, [a-z]{1,9}ß)?"
    choices = ['yes "indeed"', "no\nnever", "日本"]
    grammar = GrammarSource("lark", 'start: "(" NUMBER ")" | "[" start "]"\nNUMBER: /[0-9]{1,3}/')
    for _ in range(8):
        assert re.fullmatch(
            pattern, random_reply(compiler, tokenizer, GrammarSource("regex", pattern), chance, jumps=True)
        )
        assert random_reply(compiler, tokenizer, GrammarSource.choice(choices), chance, jumps=True) in choices
        assert re.fullmatch(r"\[*\(\d{1,3}\)\]*", random_reply(compiler, tokenizer, grammar, chance, jumps=True))


def test_forced_tokens_are_returned(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    constraint = compiled(compiler, GrammarSource.choice(["alphabetically sorted", "numbered"])).start(jumps=True)
    (first,) = tokenizer.encode_plain("alpha", at_start=False)
    assert tokenizer.decode(constraint.accept(first), continues_text=True) == "betically sorted"
    assert constraint.ended


def test_replies_with_other_vocabularies_match_the_schema(
    vocabularies: Callable[[str], Tokenizer], chance: random.Random
) -> None:
    for name in ("llama-spm", "qwen2"):
        tokenizer = vocabularies(name)
        compiler = GrammarCompiler(tokenizer)
        jsonschema.validate(
            json.loads(random_reply(compiler, tokenizer, GrammarSource.schema(PERSON), chance, jumps=True)), PERSON
        )


@pytest.mark.parametrize(
    ("schema", "place", "problem"),
    [
        ({"type": "strong"}, ".type", "strong"),
        (
            {"properties": {"a": {"type": "object", "properties": {"b": {"not": {}}}}}},
            ".properties.a.properties.b.not",
            "not",
        ),
        ({"anyOf": [{"type": "null"}, {"$ref": "#/nowhere"}]}, ".anyOf[1].$ref", "nowhere"),
        ({"items": {"$ref": "#/$defs/x"}, "$defs": {"x": {"pattern": "(a"}}}, ".$defs.x.pattern", "unclosed"),
    ],
)
def test_invalid_schema_is_refused_with_its_path(
    compiler: GrammarCompiler, schema: dict[str, Json], place: str, problem: str
) -> None:
    with pytest.raises(InvalidGrammar, match=problem) as refused:
        compiled(compiler, GrammarSource.schema(schema))
    assert refused.value.path == place


@pytest.mark.parametrize("lenient", [False, True])
def test_true_schema_allows_any_value_and_false_is_refused(compiler: GrammarCompiler, lenient: bool) -> None:
    words = np.zeros(2000, np.int32)
    assert compiled(compiler, GrammarSource.schema(True, lenient=lenient)).start(jumps=False).fill(words)
    assert words.any()
    with pytest.raises(InvalidGrammar):
        compiled(compiler, GrammarSource.schema(False, lenient=lenient))


def test_lenient_schemas_ignore_unenforceable_keywords(compiler: GrammarCompiler) -> None:
    compiled(compiler, GrammarSource.schema({"type": "object", "not": {"required": ["a"]}}, lenient=True))


def test_large_grammars_are_refused(compiler: GrammarCompiler) -> None:
    deep: Json = {"type": "string"}
    for _ in range(100):
        deep = {"items": deep}
    with pytest.raises(InvalidGrammar, match="deeper than"):
        GrammarSource.schema(deep)
    with pytest.raises(InvalidGrammar, match="characters"):
        compiled(compiler, GrammarSource("regex", "a" * (MAX_SOURCE + 1)))


def test_grammar_is_cached_until_many_others_are_compiled(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.generation.grammars.MAX_CACHED", 3)
    compiler = GrammarCompiler(tokenizer)
    first = compiled(compiler, ANY_OBJECT)
    assert compiled(compiler, ANY_OBJECT) is first
    for number in range(3):
        compiled(compiler, GrammarSource("regex", f"a{{{number + 1}}}"))
    assert compiled(compiler, ANY_OBJECT) is not first


def test_unused_grammar_expires(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.generation.grammars.CACHED_SECONDS", 0.05)
    compiler = GrammarCompiler(tokenizer)

    async def main() -> None:
        first = weakref.ref(await compiler.compile(ANY_OBJECT))
        while first() is not None:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_compiler_is_freed_before_its_grammars_expire(tokenizer: Tokenizer) -> None:
    """A compiler keeps the tokenizer and the processes of an unloaded model."""

    async def main() -> None:
        compiler = GrammarCompiler(tokenizer)
        freed = weakref.ref(compiler)
        await compiler.compile(ANY_OBJECT)
        del compiler
        gc.collect()
        assert freed() is None

    asyncio.run(main())


def test_close_ends_grammar_processes_and_threads(tokenizer: Tokenizer) -> None:
    compiler, threads = GrammarCompiler(tokenizer), set(threading.enumerate())
    grammar = weakref.ref(compiled(compiler, ANY_OBJECT))
    asyncio.run(compiler.close())
    gc.collect()
    assert grammar() is None
    for thread in set(threading.enumerate()) - threads:
        thread.join(HANGING_SECONDS)
        assert not thread.is_alive()


def test_close_refuses_waiting_and_new_compilations(tokenizer: Tokenizer) -> None:
    release = threading.Event()

    class SlowStarter(ProcessStarter):
        def start(self) -> ProcessStream:
            release.wait(HANGING_SECONDS)
            raise GrammarsUnavailable("stand-in", "")

    async def main() -> None:
        compiler = GrammarCompiler(tokenizer, SlowStarter(lambda: vocabulary_of(tokenizer), GrammarLimits()))
        sources = [GrammarSource("regex", f"a{{{number + 1}}}") for number in range(20)]
        waiting = [asyncio.create_task(compiler.compile(source)) for source in sources]
        await asyncio.sleep(0)
        await compiler.close()
        with pytest.raises(GrammarsUnavailable, match="unloaded"):
            await waiting[-1]
        with pytest.raises(GrammarsUnavailable, match="unloaded"):
            await compiler.compile(ANY_OBJECT)
        release.set()
        await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(asyncio.wait_for(main(), HANGING_SECONDS))


@pytest.mark.parametrize("text", ["a \x7f b", "tab\t", "\u2028", "\\"])
def test_choices_may_contain_any_character(
    compiler: GrammarCompiler, tokenizer: Tokenizer, chance: random.Random, text: str
) -> None:
    assert random_reply(compiler, tokenizer, GrammarSource.choice([text]), chance, jumps=True) == text


@pytest.mark.parametrize(
    ("whitespace", "pattern"), [(None, r'\{"a":\[1,1\]\}'), ("[ ]{2}", r'\{  "a"  :  \[  1  ,  1  \]  \}')]
)
def test_requested_whitespace_is_enforced(
    compiler: GrammarCompiler, tokenizer: Tokenizer, chance: random.Random, whitespace: str | None, pattern: str
) -> None:
    ones: Json = {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2}
    schema: Json = {"properties": {"a": ones}, "required": ["a"]}
    source = GrammarSource.schema(schema, whitespace=whitespace)
    text = random_reply(compiler, tokenizer, source, chance, jumps=True)
    assert json.loads(text) == {"a": [1, 1]}
    assert whitespace is not None or re.fullmatch(pattern, text)


def test_grammars_embedded_in_lark_are_checked(compiler: GrammarCompiler) -> None:
    for part, problem in (
        (GrammarSource.schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (GrammarSource("gbnf", "root ::= a\na ::= root"), "requires itself"),
        (GrammarSource("gbnf", "root ::= ("), "GBNF"),
        (GrammarSource("lark", "start: a\na: a"), "requires itself"),
    ):
        with pytest.raises(InvalidGrammar, match=problem):
            compiled(compiler, GrammarSource("lark", f'start: "x" {part.as_lark()}'))
    for part in (
        GrammarSource("gbnf", 'root ::= "y"'),
        GrammarSource("lark", 'start: "y"'),
        GrammarSource("regex", "y/"),
    ):
        compiled(compiler, GrammarSource("lark", f'start: "x" {part.as_lark()}'))
