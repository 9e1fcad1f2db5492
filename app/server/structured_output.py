"""Request fields that ask for a grammar, in all dialects, and the grammar of each.

They are OpenAI's `response_format`, vLLM's `structured_outputs` and its older `guided_*` fields, Ollama's `format`, and
llama.cpp's `grammar` and `json_schema`. All dialects enforce a schema as it is written, or name the keyword that they
do not support.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from app.errors import InvalidGrammar
from app.generation.grammars import ANY_OBJECT, MAX_SOURCE, GrammarSource, RequestedGrammar
from app.grammars.frames import WHITESPACE
from app.grammars.lark import is_gbnf
from app.server.http.errors import InvalidRequest

MAX_GBNF = 1 << 15  # characters; they are parsed one by one

Schema: TypeAlias = dict[str, Any] | bool
GrammarText: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_SOURCE)]
GbnfText: TypeAlias = Annotated[str, Meta(max_length=MAX_GBNF)]  # empty: no grammar
Choices: TypeAlias = Annotated[
    list[Annotated[str, Meta(min_length=1, max_length=4096)]], Meta(min_length=1, max_length=4096)
]


class NamedSchema(Struct):
    name: Annotated[str, Meta(max_length=256)] | None = None
    schema: Schema | None = None
    strict: bool | None = None  # ignored: every schema is enforced
    description: str | None = None


class ResponseFormat(Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema: Schema | None = None  # field in which clients of llama.cpp send the schema


class StructuredOutputs(Struct):
    """vLLM's field `structured_outputs`.

    Its members `backend`, `disable_fallback`, and `disable_additional_properties` are ignored: there is one backend,
    and objects are closed unless the schema says otherwise.
    """

    json: Schema | GrammarText | None = None
    json_object: bool | None = None
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None  # a grammar in Lark or GBNF
    whitespace_pattern: Annotated[str, Meta(max_length=256)] | None = None
    disable_any_whitespace: bool | None = None

    @property
    def whitespace(self) -> str | None:
        """The pattern of whitespace between the parts of JSON; None: no whitespace."""
        if self.disable_any_whitespace:
            return None
        return WHITESPACE if self.whitespace_pattern is None else self.whitespace_pattern or None


def response_format_grammars(given: ResponseFormat | None) -> Iterator[RequestedGrammar]:
    """Yield the grammar of OpenAI's `response_format`, if any. Raises InvalidRequest if the schema is missing."""
    if given is None or given.type == "text":
        return
    named = given.json_schema
    if given.type == "json_schema" and named is not None and named.schema is not None:
        yield schema_grammar(named.schema, "response_format.json_schema.schema")
    elif given.schema is not None:
        yield schema_grammar(given.schema, "response_format.schema")
    elif given.type == "json_schema":
        missing = "response_format.json_schema" + (".schema" if named else "")
        raise InvalidRequest(f"{missing}: it is required", parameter=missing)
    else:
        yield RequestedGrammar(ANY_OBJECT, "response_format")


def format_grammar(given: Literal["", "json"] | Schema | None) -> RequestedGrammar | None:
    """Return the grammar of Ollama's `format`."""
    if given is None or given == "":
        return None
    return RequestedGrammar(ANY_OBJECT, "format") if given == "json" else schema_grammar(given, "format")


def json_schema_grammar(schema: Schema | str | None) -> RequestedGrammar | None:
    """Return the grammar of llama.cpp's `json_schema`, which may be JSON in a string."""
    if schema is None or schema == "":
        return None
    return schema_grammar(_parse_schema(schema, "json_schema"), "json_schema")


def gbnf_grammar(grammar: str | None) -> RequestedGrammar | None:
    """Return the grammar of llama.cpp's `grammar`, in GBNF."""
    return RequestedGrammar(GrammarSource("gbnf", grammar), "grammar") if grammar else None


def structured_outputs_grammars(given: StructuredOutputs | None, prefix: str) -> Iterator[RequestedGrammar]:
    """Yield a grammar for each field that is set. Raises InvalidRequest.

    Error messages put `prefix` before the field name.
    """
    if given is None:
        return
    if given.json is not None:
        schema = _parse_schema(given.json, f"{prefix}json")
        yield schema_grammar(schema, f"{prefix}json", whitespace=given.whitespace)
    if given.json_object:
        yield schema_grammar({"type": "object"}, f"{prefix}json_object", whitespace=given.whitespace)
    if given.regex is not None:
        yield RequestedGrammar(GrammarSource("regex", given.regex), f"{prefix}regex")
    if given.choice is not None:
        yield RequestedGrammar(GrammarSource.choice(given.choice), f"{prefix}choice")
    if given.grammar is not None:
        kind: Literal["gbnf", "lark"] = "gbnf" if is_gbnf(given.grammar) else "lark"
        yield RequestedGrammar(GrammarSource(kind, given.grammar), f"{prefix}grammar")


def only_grammar(grammars: Iterator[RequestedGrammar]) -> RequestedGrammar | None:
    """Return the grammar of a request, or None. Raises InvalidRequest if there are several."""
    found = list(grammars)
    if len(found) > 1:
        first, second, *_ = (it.field for it in found)
        raise InvalidRequest(
            f"{second}: a reply can follow only one grammar; leave it or {first} out.", parameter=second
        )
    return found[0] if found else None


def schema_grammar(schema: Schema, parameter: str, *, whitespace: str | None = WHITESPACE) -> RequestedGrammar:
    """Return the grammar of a schema. Raises InvalidRequest if it is nested too deeply, or if no value matches it."""
    try:
        return RequestedGrammar(GrammarSource.schema(schema, whitespace=whitespace), parameter)
    except InvalidGrammar as error:
        path = f"{parameter}{error.path}"
        raise InvalidRequest(f"{path}: {error.message}", parameter=path) from error


def _parse_schema(schema: Schema | str, parameter: str) -> Schema:
    """Return a schema that may be JSON in a string."""
    if not isinstance(schema, str):
        return schema
    try:
        parsed: Schema = msgspec.json.decode(schema.encode(), type=Schema)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise InvalidRequest(f"{parameter}: it is not a JSON schema: {error}", parameter=parameter) from error
    return parsed
