"""Compiles grammars with the llguidance library, in a grammar process.

A grammar is rewritten (`app.grammars.schemas`), checked for rules that never end (`app.grammars.lark`), and compiled.
Then a few random tokens are tried, so that a grammar that is too complex is refused before a reply starts.
"""

import functools
import json
import math
import random
import time
from collections.abc import Mapping
from typing import Any, Final, Literal

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark

from app.grammars.frames import SIMPLIFY, GrammarProblem, GrammarText
from app.grammars.lark import UnknownSyntax, expanded, rules_of, tokens_of, with_schemas
from app.grammars.schema_keywords import Json, Schema
from app.grammars.schemas import enforceable

# Limits on the library's work for one mask, and on the size of its data. Exceeding one is an error of the grammar.
LIMITS: Final = llguidance.LLParserLimits(
    max_lexer_states=50_000, max_grammar_size=50_000, step_max_items=50_000, verbose_errors=False
)
_WALKS, _WALK_TOKENS = 2, 8
_DETAIL_CHARS: Final = 400
# Words that identify the library's errors about limits, and its errors about grammars that match nothing.
_LIMIT_WORDS: Final = (
    "too many",
    "too large",
    "limit",
    "fuel",
    "max is",
    "unable to determine",
    "panic",
    "stack level",
)
_EMPTY_WORDS: Final = ("unsatisfiable", "noextension")


class Compiler:
    """Compiles grammars for one vocabulary.

    `tokenizer` has the whole vocabulary, `bytes_tokenizer` only single bytes. A grammar is too complex if a mask takes
    more than `mask_cpu_seconds` of CPU time.
    """

    def __init__(
        self,
        tokenizer: llguidance.LLTokenizer,
        bytes_tokenizer: llguidance.LLTokenizer,
        mask_cpu_seconds: float = math.inf,
    ) -> None:
        self._tokenizer = tokenizer
        self._bytes_tokenizer = bytes_tokenizer
        self._mask_cpu_seconds = mask_cpu_seconds

    def compile(self, source: GrammarText) -> llguidance.LLMatcher:
        """Return a matcher at the start of the grammar. Raises GrammarProblem."""
        matcher = _matcher(self._tokenizer, self._library_text(source))
        if problem := matcher.get_error():
            raise problem_of(problem)
        chance = random.Random(0)  # noqa: S311  # the same walks each time
        for _ in range(_WALKS):
            self._follow(matcher.deep_copy(), chance)
        return matcher

    def _library_text(self, source: GrammarText) -> str:
        if source.kind == "json":
            schema = enforceable(json.loads(source.text), self._leaf_problem, lenient=source.lenient)
            return _json_grammar(schema, source.guidance())
        if source.kind == "regex":
            return llguidance.LLMatcher.grammar_from_regex(source.text)
        return self._checked_lark(_lark_of(source.text) if source.kind == "gbnf" else source.text)

    def _checked_lark(self, text: str) -> str:
        try:
            text = expanded(text, _lark_of)
            tokens = tokens_of(text)
            rules = rules_of(text, tokens)
        except (UnknownSyntax, RecursionError):
            return text
        definitions = "\n".join(rules.terminals.values())
        names, is_empty = rules.find_endless(lambda name: self._is_empty(f"start: {name}\n{definitions}"))
        if is_empty:
            raise GrammarProblem(f"No text matches it: nothing matches {names[-1]}.")
        if names:
            chain = " > ".join(names)
            raise GrammarProblem(f"No finite text matches it: rule {names[-1]!r} requires itself ({chain}).")
        return with_schemas(text, tokens, self._rewritten)

    def _rewritten(self, schema: Json) -> Json:
        """Rewrite a schema within a grammar.

        Its `x-guidance` has the format of the JSON, and the schema's path for errors.
        """
        guidance = schema.get("x-guidance") if isinstance(schema, Mapping) else None
        options: dict[str, Json] = dict(guidance) if isinstance(guidance, Mapping) else {}
        lenient, path = bool(options.pop("lenient", False)), options.pop("path", "")
        try:
            rewritten = enforceable(schema, self._leaf_problem, lenient=lenient)
        except GrammarProblem as problem:
            raise GrammarProblem(problem.message, f"{path}{problem.path}") from problem
        return {**rewritten, "x-guidance": options} if options else rewritten

    @functools.lru_cache(maxsize=4096)  # noqa: B019  # a process compiles one grammar
    def _is_empty(self, lark: str) -> bool:
        matcher = _matcher(self._bytes_tokenizer, lark)
        matcher.compute_bitmask()
        return _is_empty(matcher.get_error())

    def _leaf_problem(self, leaf: Schema) -> tuple[Literal["empty", "invalid"], str] | None:
        matcher = _matcher(self._bytes_tokenizer, _json_grammar(leaf, {}))
        if not (problem := matcher.get_error()):
            return None
        return ("empty" if _is_empty(problem) else "invalid"), problem_of(problem).message

    def _follow(self, matcher: llguidance.LLMatcher, chance: random.Random) -> None:
        """Try a grammar with a few random tokens. Raises GrammarProblem."""
        for position in range(_WALK_TOKENS):
            began = time.process_time()
            mask = int.from_bytes(matcher.compute_bitmask(), "little")
            if (seconds := time.process_time() - began) > self._mask_cpu_seconds:
                raise too_complex(f"a mask takes {seconds * 1000:,.0f} ms")
            if problem := matcher.get_error():
                if position and _is_empty(problem):
                    return  # a dead end, which the model may never reach: not an error
                raise problem_of(problem)
            if matcher.is_stopped() or not matcher.consume_token(_drawn(mask, chance)):
                return


def _matcher(tokenizer: llguidance.LLTokenizer, text: str) -> llguidance.LLMatcher:
    return llguidance.LLMatcher(tokenizer, text, log_level=0, limits=LIMITS)


def _json_grammar(schema: Schema, guidance: Mapping[str, Json]) -> str:
    options: Any = {**guidance, "lenient": False}
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)


def _lark_of(grammar: str) -> str:
    try:
        return gbnf_to_lark(grammar)
    except Exception as error:  # the library raises plain Exception as well
        detail = str(error) or type(error).__name__
        raise GrammarProblem(f"It is not valid GBNF: {detail[:_DETAIL_CHARS]}.") from error


def _drawn(mask: int, chance: random.Random) -> int:
    """Return the index of a random bit that is set."""
    shifted = mask >> (start := chance.randrange(max(1, mask.bit_length())))
    return start + (shifted & -shifted).bit_length() - 1


def problem_of(text: str) -> GrammarProblem:
    """Convert an error of the library to a message with a remedy."""
    detail = text.replace("<non-verbose/>", "").split("<backtrace>")[0].strip()[:_DETAIL_CHARS]
    if _is_empty(detail):
        return GrammarProblem(f"No text matches it ({detail}).")
    if any(words in detail.lower() for words in _LIMIT_WORDS):
        return too_complex(detail.splitlines()[0])
    return GrammarProblem(detail)


def too_complex(detail: str) -> GrammarProblem:
    return GrammarProblem(f"It is too complex: {detail}. {SIMPLIFY}")


def _is_empty(problem: str) -> bool:
    return any(words in problem.lower() for words in _EMPTY_WORDS)
