"""Structured output: which grammar a request asks for, in any of the ways in which clients say so.

OpenAI's `response_format`, vLLM's `structured_outputs` and its older `guided_*` fields, Ollama's `format`, llama.cpp's
`grammar`. Refuses to know how a grammar is compiled and who keeps to it.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from app.chat.grammars import ANY_OBJECT, MAX_SOURCE, GrammarCompiler, GrammarSource
from app.errors import InvalidGrammar
from app.server.errors import InvalidRequest
from engine.constraint import Grammar

Schema: TypeAlias = dict[str, Any] | bool
GrammarText: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_SOURCE)]
Choices: TypeAlias = Annotated[
    list[Annotated[str, Meta(min_length=1, max_length=4096)]], Meta(min_length=1, max_length=4096)
]


class NamedSchema(Struct):
    name: Annotated[str, Meta(max_length=256)]
    schema: Schema | None = None
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema: Schema | None = None  # of a json_object, as llama.cpp's clients send it


class StructuredOutputs(Struct):
    """As vLLM has it."""

    json: Schema | GrammarText | None = None
    json_object: bool | None = None
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None


@dataclass(frozen=True, slots=True)
class AskedGrammar:
    """A grammar, and the field that asks for it."""

    source: GrammarSource
    parameter: str

    async def compiled(self, compiler: GrammarCompiler) -> Grammar:
        """Raises InvalidRequest naming the field, and the place in it."""
        with naming_grammar(self.parameter):
            return await compiler.compile(self.source)


@contextlib.contextmanager
def naming_grammar(parameter: str) -> Iterator[None]:
    """Errors about a grammar, raised inside, name the field of the request that it came in."""
    try:
        yield
    except InvalidGrammar as error:
        place = f"{parameter}{error.place}"
        raise InvalidRequest(f"{place}: {error.message}", parameter=place) from error


def of_response_format(wanted: ResponseFormat | None) -> Iterator[AskedGrammar]:
    """One at most. Raises InvalidRequest for one that lacks its schema."""
    if wanted is None or wanted.type == "text":
        return
    if wanted.type == "json_schema":
        named = wanted.json_schema
        if named is None or named.schema is None:
            missing = "response_format.json_schema" + (".schema" if named else "")
            raise InvalidRequest(f"{missing}: it is required", parameter=missing)
        # Without `strict`, OpenAI takes keywords that it does not keep to; so do we.
        yield of_schema(named.schema, "response_format.json_schema.schema", lenient=not named.strict)
    elif wanted.schema is not None:
        yield of_schema(wanted.schema, "response_format.schema", lenient=True)
    else:
        yield AskedGrammar(ANY_OBJECT, "response_format")


def of_format(wanted: Literal["", "json"] | Schema | None) -> AskedGrammar | None:
    """Ollama's `format`. Keywords that it does not keep to it takes, and so do we."""
    if wanted is None or wanted == "":
        return None
    return AskedGrammar(ANY_OBJECT, "format") if wanted == "json" else of_schema(wanted, "format", lenient=True)


def of_json_schema(schema: Schema | str | None) -> AskedGrammar | None:
    """llama.cpp's `json_schema`, which may be text. Keywords that it does not keep to are taken."""
    if schema is None or schema == "":
        return None
    return of_schema(_parsed(schema, "json_schema"), "json_schema", lenient=True)


def of_gbnf(grammar: str | None) -> AskedGrammar | None:
    """llama.cpp's `grammar`, in its own form."""
    return AskedGrammar(GrammarSource("gbnf", grammar), "grammar") if grammar else None


def of_structured_outputs(wanted: StructuredOutputs | None, prefix: str) -> Iterator[AskedGrammar]:
    """One for each of its fields; `prefix` is what their names begin with in the request."""
    if wanted is None:
        return
    if wanted.json is not None:
        yield of_schema(_parsed(wanted.json, f"{prefix}json"), f"{prefix}json", lenient=False)
    if wanted.json_object:
        yield AskedGrammar(ANY_OBJECT, f"{prefix}json_object")
    if wanted.regex is not None:
        yield AskedGrammar(GrammarSource("regex", wanted.regex), f"{prefix}regex")
    if wanted.choice is not None:
        yield AskedGrammar(GrammarSource.choice(wanted.choice), f"{prefix}choice")
    if wanted.grammar is not None:
        yield AskedGrammar(GrammarSource("lark", wanted.grammar), f"{prefix}grammar")


def only(asked: Iterator[AskedGrammar]) -> AskedGrammar | None:
    """The one grammar of a request. Raises InvalidRequest where there are several."""
    several = list(asked)
    if len(several) > 1:
        first, second, *_ = (it.parameter for it in several)
        raise InvalidRequest(f"{second}: a reply keeps to one grammar, and {first} is another.", parameter=second)
    return several[0] if several else None


def of_schema(schema: Schema, parameter: str, *, lenient: bool) -> AskedGrammar:
    """A schema that came in a field. Raises InvalidRequest for one that cannot be kept to, unless lenient."""
    with naming_grammar(parameter):
        return AskedGrammar(GrammarSource.schema(schema, lenient=lenient), parameter)


def _parsed(schema: Schema | str, parameter: str) -> Schema:
    """A schema that may be JSON in a string."""
    if not isinstance(schema, str):
        return schema
    try:
        parsed: Schema = msgspec.json.decode(schema.encode(), type=Schema)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise InvalidRequest(f"{parameter}: it is no JSON schema: {error}", parameter=parameter) from error
    return parsed
