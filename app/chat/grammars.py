"""Grammars: what a reply must be like, compiled for one vocabulary over the llguidance library.

JSON schemas, regular expressions, choices, Lark and GBNF grammars come in as texts; what goes out is what the engine
asks which tokens may come next. Compiling is bounded, done on a thread, and remembered. Refuses to know requests and
where a reply's thinking ends.
"""

import asyncio
import collections
import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark

from app.chat.messages import Json
from app.errors import InvalidGrammar
from app.text.tokenizer import Tokenizer
from engine.constraint import Constraint, Grammar, Words

MAX_SOURCE = 1 << 18  # characters
MAX_DEPTH = 64
REMEMBERED = 64  # grammars; each of these takes a few megabytes at most, by its limits
MOST_BLAMED = 200  # parts of a schema that are compiled to find the bad one

LIMITS = llguidance.LLParserLimits(max_lexer_states=50_000, max_grammar_size=200_000, verbose_errors=False)
# Between the parts of JSON there may be nothing, a space, or a line break with its indentation. Without a bound, a
# model that is not sure how to go on writes spaces for ever.
WHITESPACE = r"( |\n {0,32})?"

# Tokens of texts, by their lengths: where a text may go on with as many characters, all of a slice are allowed at once
# and are not looked at one by one. The library's own know 10 and 30, so that of a text of at most 30 characters nearly
# all longer tokens were looked at again and again.
_CHARACTER = r'[^"\\\x00-\x1F\x7F]'
SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{_CHARACTER}{{1,{most}}}" for most in (10, 12, 16, 30)), f"{_CHARACTER}+"]

ANYTHING: Json = {}  # what the library takes for the schemas true and false
NOTHING: Json = {"enum": []}

Kind: TypeAlias = Literal["json", "regex", "lark", "gbnf"]


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A grammar as it was asked for."""

    kind: Kind
    text: str  # a JSON schema, a regular expression, or a grammar in llguidance's Lark or llama.cpp's GBNF
    lenient: bool = False  # of a schema: keywords that cannot be kept are ignored, and not refused

    @classmethod
    def schema(cls, schema: Json, *, lenient: bool = False) -> "GrammarSource":
        """Raises InvalidGrammar where it is nested too deeply, or nothing keeps to it."""
        if schema is False:
            raise InvalidGrammar("Nothing keeps to it.")
        if schema is True:
            schema = {}
        if _depth(schema) > MAX_DEPTH:
            raise InvalidGrammar(f"It is nested deeper than {MAX_DEPTH} levels.")
        if isinstance(schema, bool):
            schema = ANYTHING if schema else NOTHING
        return cls("json", json.dumps(schema, ensure_ascii=False), lenient)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> "GrammarSource":
        """One of some texts."""
        return cls("lark", "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts))

    def as_lark(self) -> str:
        """The same as one expression of a larger Lark grammar."""
        if self.kind == "json":
            guidance = {"whitespace_pattern": WHITESPACE, "lenient": self.lenient}
            schema = json.loads(self.text)
            return f"%json {json.dumps({'x-guidance': guidance, **schema} if isinstance(schema, dict) else schema)}"
        if self.kind == "regex":
            return f"/{_SLASH_OR_LINE.sub(_written_in_slashes, self.text)}/"
        return f"%lark {{\n{_lark_of_gbnf(self.text) if self.kind == 'gbnf' else self.text}\n}}"


_SLASH_OR_LINE = re.compile(r"\\.|/|\n", re.DOTALL)  # what is escaped already is found first


def _written_in_slashes(found: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n"}.get(found[0], found[0])


ANY_OBJECT = GrammarSource("json", '{"type": "object"}')


class GrammarCompiler:
    """Compiles grammars for one vocabulary. Safe for several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._vocabulary = _Vocabulary(tokenizer)
        self._compiled: collections.OrderedDict[GrammarSource, CompiledGrammar] = collections.OrderedDict()
        self._lock = threading.Lock()  # one is compiled at a time, whoever asks

    async def compile(self, source: GrammarSource) -> Grammar:
        """Raises InvalidGrammar, naming the place of a schema that it is about."""
        known = self._compiled.get(source)
        return known if known is not None else await asyncio.to_thread(self._compile, source)

    def prepare(self) -> None:
        """Do now what the first grammar would wait for: a quarter of a second for 50,000 tokens, and two for
        260,000, in which no other Python code runs."""
        with self._lock:
            self._vocabulary.prepare()

    def _compile(self, source: GrammarSource) -> "CompiledGrammar":
        with self._lock:
            if source not in self._compiled:
                self._compiled[source] = self._new(source)
            self._compiled.move_to_end(source)
            if len(self._compiled) > REMEMBERED:
                self._compiled.popitem(last=False)
            return self._compiled[source]

    def _new(self, source: GrammarSource) -> "CompiledGrammar":
        if len(source.text) > MAX_SOURCE:
            raise InvalidGrammar(f"It has {len(source.text):,} characters; at most {MAX_SOURCE:,} are compiled.")
        matcher = self._matcher(source)
        if problem := matcher.get_error():
            place = self._blamed(json.loads(source.text), source.lenient) if source.kind == "json" else ""
            raise InvalidGrammar(problem.strip(), place=place)
        return CompiledGrammar(matcher, self._vocabulary.mask_bytes, jumps=self._vocabulary.jumps)

    def _matcher(self, source: GrammarSource) -> llguidance.LLMatcher:
        return llguidance.LLMatcher(self._vocabulary.prepare(), _library_grammar(source), log_level=0, limits=LIMITS)

    def _blamed(self, schema: Json, lenient: bool) -> str:
        """The path of the smallest part of a bad schema that is bad by itself."""
        shared = {key: schema[key] for key in ("$defs", "definitions") if isinstance(schema, Mapping) and key in schema}
        place, left = "", MOST_BLAMED
        parts = list(_parts(schema))
        while parts and left:
            left -= 1
            step, part = parts.pop(0)
            if isinstance(part, Mapping):
                alone = GrammarSource.schema({**shared, **part}, lenient=lenient)
                if self._matcher(alone).get_error():
                    place, parts = place + step, list(_parts(part))
        return place


def _library_grammar(source: GrammarSource) -> str:
    if source.kind == "json":
        overrides = {"whitespace_pattern": WHITESPACE, "lenient": source.lenient}
        try:
            return llguidance.LLMatcher.grammar_from_json_schema(source.text, overrides=overrides)  # type: ignore[arg-type]
        except ValueError as error:
            raise InvalidGrammar(str(error)) from error
    if source.kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(source.text)
    lark = _lark_of_gbnf(source.text) if source.kind == "gbnf" else source.text
    return llguidance.LLMatcher.grammar_from_lark(lark)


def _lark_of_gbnf(grammar: str) -> str:
    """Raises InvalidGrammar."""
    try:
        return gbnf_to_lark(grammar)
    except Exception as error:  # the library raises plain ones, too
        raise InvalidGrammar(f"It is not understood as GBNF: {str(error) or type(error).__name__}.") from error


def _parts(schema: Json) -> Iterator[tuple[str, Json]]:
    """The schemas directly in a schema, with the step that leads to each; definitions are parts, too."""
    if not isinstance(schema, Mapping):
        return
    for key in ("$defs", "definitions", "properties", "patternProperties"):
        members = schema.get(key)
        if isinstance(members, Mapping):
            yield from ((f".{key}.{name}", part) for name, part in members.items())
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        members = schema.get(key)
        if isinstance(members, Sequence) and not isinstance(members, str):
            yield from ((f".{key}[{number}]", part) for number, part in enumerate(members))
    for key in ("items", "additionalProperties", "not", "if", "then", "else"):
        if key in schema:
            yield f".{key}", schema[key]


def _depth(value: Json) -> int:
    """How deeply objects and lists are nested."""
    level, depth = [value], 0
    while level:
        members = [list(it.values()) if isinstance(it, Mapping) else it for it in level if _holds(it)]
        level = [member for several in members if isinstance(several, Sequence) for member in several]
        depth += 1
    return depth


def _holds(value: Json) -> bool:
    return isinstance(value, Mapping | Sequence) and not isinstance(value, str)


class _Vocabulary:
    """The tokens as the library knows them, which takes it a while to build."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.mask_bytes = 4 * -(-tokenizer.vocab_size // 32)
        self._built: llguidance.LLTokenizer | None = None
        # Where texts cannot go on in the middle, what must follow is left to be drawn, a token at a time.
        self.jumps = tokenizer.encode_continuation("a") is not None

    def prepare(self) -> llguidance.LLTokenizer:
        if self._built is None:
            ends = sorted(self._tokenizer.end_of_generation_ids)
            if not ends:
                raise InvalidGrammar("The model's vocabulary has no token that ends a reply, so that none can be held.")
            self._built = llguidance.LLTokenizer(_Wrapper(self._tokenizer), eos_token=ends, slices=SLICES)  # type: ignore[arg-type]
        return self._built


class _Wrapper:
    """What the library asks of a tokenizer."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.eos_token_id = min(tokenizer.end_of_generation_ids)
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(token_id, show_control=True) for token_id in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.control_tokens.values())
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        """The ids of a text that goes on in the middle of another."""
        if isinstance(text, bytes):
            text = text.decode()
        return list(self._tokenizer.encode_continuation(text) or ()) if text else []


class CompiledGrammar:
    """See `engine.constraint.Grammar`."""

    def __init__(self, matcher: llguidance.LLMatcher, mask_bytes: int, *, jumps: bool) -> None:
        """`mask_bytes` are those of the tokens that there are texts for, in whole words; the others stay forbidden."""
        self._matcher = matcher
        self._mask_bytes = mask_bytes
        self._jumps = jumps

    def begin(self, *, jumps: bool) -> Constraint:
        return _Reply(self._matcher.deep_copy(), self._mask_bytes, jumps=jumps and self._jumps)


class GrammarFailed(InvalidGrammar):
    """A grammar that was compiled turned out to be too much on the way."""


class _Reply:
    """See `engine.constraint.Constraint`."""

    def __init__(self, matcher: llguidance.LLMatcher, mask_bytes: int, *, jumps: bool) -> None:
        self._matcher = matcher
        self._mask_bytes = mask_bytes
        self._jumps = jumps

    @property
    def ended(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def fill(self, words: Words) -> bool:
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, self._mask_bytes)
        if self._matcher.is_error():
            raise GrammarFailed(f"The grammar failed: {self._matcher.get_error()}")
        return True

    def accept(self, token_id: int) -> Sequence[int]:
        if not self._matcher.consume_token(token_id) or not self._jumps:
            return ()
        forced = self._matcher.compute_ff_tokens()
        return forced if forced and self._matcher.consume_tokens(forced) else ()
