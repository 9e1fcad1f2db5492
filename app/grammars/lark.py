"""Lark and GBNF grammars as texts: told apart, their JSON schemas rewritten, and checked for rules that never end.

The grammar library's dialect of Lark has the same tokens in its `docs/syntax.md`. What this module does not understand
it leaves to the library.
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
# What may hold `::=` as text: strings, comments, character classes and regular expressions.
_GBNF: Final = re.compile(r'"(?:\\.|[^"\\\n])*"|\#[^\n]*|//[^\n]*|\[(?:\\.|[^\]\\\n])*\]|/(?:\\.|[^/\\\n])+/|(::=)')
# What a regular expression or terminal that no text fits has: a class of nothing, an intersection, or a negation.
_MAY_BE_EMPTY: Final = re.compile(r"\[\^(?:\\.|[^\]\\])*?\\[sSdDwWpP]|[&~]|\\P")
_WITH_JSON: Final = frozenset(("%json", "%regex", "%llguidance", "%gbnf"))


def literal(text: str) -> str:
    """A text as a literal of Lark."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def is_gbnf(text: str) -> bool:
    """Whether a grammar is written in GBNF, or another EBNF with `::=`, and not in Lark."""
    return any(found[1] for found in _GBNF.finditer(text))


class UnknownSyntax(Exception):
    """The grammar has something that this module does not know; the library may."""


@dataclass(frozen=True, slots=True)
class Token:
    """A word of a Lark grammar. `value` is the JSON behind `%json` and its like."""

    kind: str
    text: str
    start: int
    end: int
    value: Json = None


def tokens_of(text: str) -> list[Token]:
    """Raises UnknownSyntax."""
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
    """The grammar with those in GBNF that are written in it (`%gbnf "..."`, our own word) as Lark."""
    if "%gbnf" not in text:
        return text
    pieces, at = [], 0
    for token in tokens_of(text):
        if token.text == "%gbnf" and isinstance(token.value, str):
            pieces += [text[at : token.start], f"%lark {{\n{lark_of(token.value)}\n}}"]
            at = token.end
    return "".join((*pieces, text[at:]))


def with_schemas(text: str, tokens: Sequence[Token], rewrite: Callable[[Json], Json]) -> str:
    """The grammar with each JSON schema in it rewritten."""
    pieces, at = [], 0
    for token in tokens:
        if token.text == "%json":
            pieces += [text[at : token.start], "%json ", json.dumps(rewrite(token.value), ensure_ascii=False)]
            at = token.end
    return "".join((*pieces, text[at:]))


# What a rule needs to end: a name, all of several, or one of several.
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
    """What each rule and terminal of a grammar needs."""

    needs: Mapping[str, Need]
    terminals: Mapping[str, str]  # definitions, by name
    regexes: Sequence[str]  # which are their own names in `needs`

    def find_endless(self, is_empty: Callable[[str], bool]) -> "tuple[list[str], bool]":
        """If no finite text fits the start: the way from there to what is at fault, and whether that fits no text at
        all; else it leads back to itself. `is_empty` compiles a terminal or a regex."""
        leaves = {**self.terminals, **{regex: regex for regex in self.regexes}}
        empty = {name for name, text in leaves.items() if _MAY_BE_EMPTY.search(text) and is_empty(name)}
        unmet = empty | self.needs.keys()
        while found := {name for name in unmet - empty if _blocker(self.needs[name], unmet) is None}:
            unmet -= found
        cycle: list[str] = []
        step: str | None = "start" if "start" in unmet else None
        while step is not None:
            cycle.append(step)
            step = None if step in empty or step in cycle[:-1] else _blocker(self.needs[step], unmet)
        return cycle, bool(cycle) and cycle[-1] in empty


def _blocker(need: Need, unmet: AbstractSet[str]) -> str | None:
    """A name that keeps a need from being met; None if it is met."""
    if isinstance(need, str):
        return need if need in unmet else None
    blockers = [_blocker(one, unmet) for one in need.needs]
    if isinstance(need, Any) and None in blockers:
        return None
    return next((one for one in blockers if one is not None), None)


def rules_of(text: str, tokens: Sequence[Token]) -> Rules:
    """Raises UnknownSyntax."""
    return _Parser(text, tokens).rules()


class _Parser:
    """Reads rules by recursive descent."""

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
        """A grammar within: its names are its own."""
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
