"""Lark and GBNF grammars as text: detects GBNF, rewrites JSON schemas in a grammar, and finds rules that never end.

The dialect of Lark is that of the grammar library (its `docs/syntax.md`). Syntax that this module does not know is left
to the library.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final, TypeAlias

from app.grammars.schema_keywords import Json

_DECODER: Final = json.JSONDecoder()
_TOKEN: Final = re.compile(
    r"""
    (?P<skip>[ \t]+|(?:\#|//)[^\n]*)
  | (?P<newline>(?:\r?\n)+)
  | (?P<string>"(?:\\.|[^"\\\n])*"i?)
  | (?P<regex>/(?:\\.|[^/\\])+/[imslux]*)
  | (?P<directive>%[a-z]+)
  | (?P<special><[^<>\s]+>)
  | (?P<name>[!?]*_?[A-Za-z][\w\-]*|@[\w\-]+)
  | (?P<number>[+-]?\d+(?:\.\d+)?)
  | (?P<sign>->|\.\.|::|[:|&~()\[\]{}+*?,.=_])
    """,
    re.VERBOSE,
)
# Tokens that may contain `::=` as text (strings, comments, character classes, and regular expressions), or `::=`
# itself.
_GBNF: Final = re.compile(r'"(?:\\.|[^"\\\n])*"|\#[^\n]*|//[^\n]*|\[(?:\\.|[^\]\\\n])*\]|/(?:\\.|[^/\\\n])+/|(::=)')
# Syntax that occurs in every expression without matches: an empty class, an intersection, or a negation.
_MAY_BE_EMPTY: Final = re.compile(r"\[\^(?:\\.|[^\]\\])*?\\[sSdDwWpP]|[&~]|\\P")
_WITH_JSON: Final = frozenset(("%json", "%regex", "%llguidance", "%gbnf"))


def literal(text: str) -> str:
    """Return a text as a Lark literal."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def is_gbnf(text: str) -> bool:
    """Whether a grammar is GBNF, or another EBNF with `::=`, rather than Lark."""
    return any(found[1] for found in _GBNF.finditer(text))


class UnknownSyntax(Exception):
    """The grammar contains syntax that this module does not know, but the library may."""


@dataclass(frozen=True, slots=True)
class Token:
    """A token of a Lark grammar. `value` is the JSON after `%json` and similar directives."""

    kind: str
    text: str
    start: int
    end: int
    value: Json = None


def tokens_of(text: str) -> list[Token]:
    """Return the tokens of a grammar. Raises UnknownSyntax."""
    return [token for token in _tokens(text) if token.kind != "skip"]


def _tokens(text: str) -> Iterator[Token]:
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise UnknownSyntax
        end, value, word = found.end(), None, found[0]
        if word in _WITH_JSON:
            try:
                value, end = _DECODER.raw_decode(text, re.compile(r"\s*").match(text, end).end())  # type: ignore[union-attr]
            except (ValueError, RecursionError) as error:
                raise UnknownSyntax from error
        yield Token(str(found.lastgroup), word, at, end, value)
        at = end


def expanded(text: str, lark_of: Callable[[str], str]) -> str:
    """Replace each GBNF grammar within a grammar (`%gbnf "..."`, not part of the library's syntax) by Lark."""
    if "%gbnf" not in text:
        return text
    pieces, at = [], 0
    for token in tokens_of(text):
        if token.text == "%gbnf" and isinstance(token.value, str):
            pieces += [text[at : token.start], f"%lark {{\n{lark_of(token.value)}\n}}"]
            at = token.end
    return "".join((*pieces, text[at:]))


def with_schemas(text: str, tokens: Sequence[Token], rewrite: Callable[[Json], Json]) -> str:
    """Replace each JSON schema within a grammar by its rewritten form."""
    pieces, at = [], 0
    for token in tokens:
        if token.text == "%json":
            pieces += [text[at : token.start], "%json ", json.dumps(rewrite(token.value), ensure_ascii=False)]
            at = token.end
    return "".join((*pieces, text[at:]))


# The rules that must end before a rule can end: one rule, all of several, or any of several.
Need: TypeAlias = "str | All | Any"


@dataclass(frozen=True, slots=True)
class All:
    needs: Sequence[Need]


@dataclass(frozen=True, slots=True)
class Any:
    needs: Sequence[Need]


ALWAYS_ENDS: Final = All(())


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules and terminals of a grammar, with the conditions under which each of them can end."""

    needs: Mapping[str, Need]
    terminals: Mapping[str, str]  # definitions of the terminals, by name
    regexes: Sequence[str]  # regular expressions of the grammar; `needs` refers to them by their text

    def find_endless(self, is_empty: Callable[[str], bool]) -> "tuple[list[str], bool]":
        """Return the chain of rules that prevents the start rule from matching a finite text; empty if it matches one.

        The second value is true if the last rule of the chain matches no text, and false if the chain ends in a cycle.
        `is_empty` compiles a terminal or a regular expression.
        """
        leaves = {**self.terminals, **{regex: regex for regex in self.regexes}}
        empty = {name for name, text in leaves.items() if _MAY_BE_EMPTY.search(text) and is_empty(name)}
        unmet = empty | self.needs.keys()
        while found := {name for name in unmet - empty if _blocker(self.needs[name], unmet) is None}:
            unmet -= found
        names: list[str] = []
        step: str | None = "start" if "start" in unmet else None
        while step is not None:
            names.append(step)
            step = None if step in empty or step in names[:-1] else _blocker(self.needs[step], unmet)
        return names, bool(names) and names[-1] in empty


def _blocker(need: Need, unmet: AbstractSet[str]) -> str | None:
    """Return a name in `unmet` that keeps `need` from being met, or None if the need is met."""
    if isinstance(need, str):
        return need if need in unmet else None
    blockers = [_blocker(one, unmet) for one in need.needs]
    if isinstance(need, Any) and None in blockers:
        return None
    return next((one for one in blockers if one is not None), None)


def rules_of(text: str, tokens: Sequence[Token]) -> Rules:
    """Parse the rules of a grammar. Raises UnknownSyntax."""
    return _Parser(text, tokens).rules()


class _Parser:
    """Recursive-descent parser of rules."""

    def __init__(self, text: str, tokens: Sequence[Token]) -> None:
        self._text = text
        self._tokens = tokens
        self._at = 0
        self._needs: dict[str, Need] = {}
        self._terminals: dict[str, str] = {}
        self._regexes: list[str] = []

    def rules(self) -> Rules:
        while self._at < len(self._tokens):
            if not self._take("\n"):
                self._item()
        return Rules(self._needs, self._terminals, self._regexes)

    def _item(self) -> None:
        token = self._next()
        if token.kind == "directive":
            self._skip_line()
            return
        if token.kind != "name":
            raise UnknownSyntax
        name = token.text.lstrip("?!")
        start = token.start
        if self._peek() == "[":
            self._skip_group()
        if self._take("."):
            self._next()
        if not self._take(":"):
            raise UnknownSyntax
        need = self._alternatives()
        self._needs[name] = need
        if name.lstrip("_")[0].isupper():
            self._terminals[name] = self._text[start : self._tokens[self._at - 1].end]

    def _alternatives(self) -> Need:
        several = [self._alternative()]
        while self._bar():
            several.append(self._alternative())
        return several[0] if len(several) == 1 else Any(several)

    def _bar(self) -> bool:
        if self._take("|"):
            return True
        if self._peek() == "\n" and self._at + 1 < len(self._tokens) and self._tokens[self._at + 1].text == "|":
            self._at += 2
            return True
        return False

    def _alternative(self) -> Need:
        needs: list[Need] = []
        while self._peek() not in ("\n", "|", ")", "]", "}", ""):
            if self._take("->"):
                self._next()
            elif not self._take("&"):
                needs.append(self._repeated())
        return All(needs)

    def _repeated(self) -> Need:
        need = self._atom()
        least = 1
        if self._take("*") or self._take("?"):
            least = 0
        elif self._take("~"):
            least = self._number()
            if self._take(".."):
                self._number()
        elif self._take("{"):
            least = 0 if self._peek() == "," else self._number()
            while not self._take("}"):
                self._next()
        else:
            self._take("+")
        return need if least else ALWAYS_ENDS

    def _number(self) -> int:
        token = self._next()
        if token.kind != "number":
            raise UnknownSyntax
        return int(float(token.text))

    def _atom(self) -> Need:
        if self._take("~"):
            self._atom()
            return ALWAYS_ENDS
        token = self._next()
        if token.text == "(":
            need = self._alternatives()
            self._close(")")
            return need
        if token.text == "[":
            self._alternatives()
            self._close("]")
            return ALWAYS_ENDS
        if token.text == "%lark":
            return self._nested()
        if token.kind == "regex":
            self._regexes.append(token.text)
            return token.text
        if token.kind == "string":
            if self._take(".."):
                self._next()
            return ALWAYS_ENDS
        if token.kind == "name" and self._peek() != "::":
            return token.text.lstrip("?!")
        if token.kind == "special" or token.text in _WITH_JSON:
            return ALWAYS_ENDS
        raise UnknownSyntax

    def _nested(self) -> Need:
        """Parse a nested grammar. Its names are separate from those of the outer grammar."""
        start = self._at
        if not self._take("{"):
            raise UnknownSyntax
        depth, begin = 1, self._at
        while depth:
            depth += {"{": 1, "}": -1}.get(self._next().text, 0)
        inner = _Parser(self._text, self._tokens[begin : self._at - 1]).rules()
        prefix = f"%lark {start} "
        for name, need in inner.needs.items():
            self._needs[prefix + name] = _renamed(need, inner, prefix)
        self._regexes += inner.regexes
        return prefix + "start"

    def _close(self, sign: str) -> None:
        while self._take("\n"):
            pass
        if not self._take(sign):
            raise UnknownSyntax

    def _skip_line(self) -> None:
        while self._peek() not in ("\n", ""):
            self._next()

    def _skip_group(self) -> None:
        while self._next().text != "]":
            pass

    def _peek(self) -> str:
        if self._at >= len(self._tokens):
            return ""
        token = self._tokens[self._at]
        return "\n" if token.kind == "newline" else token.text

    def _take(self, sign: str) -> bool:
        if self._peek() != sign:
            return False
        self._at += 1
        return True

    def _next(self) -> Token:
        if self._at >= len(self._tokens):
            raise UnknownSyntax
        self._at += 1
        return self._tokens[self._at - 1]


def _renamed(need: Need, inner: Rules, prefix: str) -> Need:
    if isinstance(need, str):
        return prefix + need if need in inner.needs else need
    return type(need)([_renamed(one, inner, prefix) for one in need.needs])
