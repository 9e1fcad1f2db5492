"""Builds a grammar from rules, in llguidance's dialect of Lark (its docs/syntax.md).

Control tokens are written as ids, because plain text cannot express them.
"""

import json
import re
from collections.abc import Mapping, Sequence

from app.generation.conversation import Json
from app.grammars.lark import literal

_ANYTHING = "/(.|\\n)*/"
# JSON as templates write it, so that a call has the same ids when a client sends it back.
_GUIDANCE: Mapping[str, Json] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class LarkRules:
    """The rules of a grammar."""

    def __init__(self, control: Mapping[str, int]) -> None:
        self._control = control
        tokens = sorted((text for text in control if len(text) > 1), key=len, reverse=True)
        self._tokens = re.compile(f"({'|'.join(map(re.escape, tokens)) or '(?!)'})")
        self._names: dict[tuple[str, str], str] = {}  # names of rules, by attributes and expression

    def start(self, expression: str) -> str:
        rules = (f"{name}{attributes}: {rule}" for (attributes, rule), name in self._names.items())
        return "\n".join((f"start: {expression}", *rules))

    def rule(self, expression: str, attributes: str = "") -> str:
        """Return the name of a rule with this expression. An existing one is reused."""
        return self._names.setdefault((attributes, expression), f"r{len(self._names)}")

    def text(self, text: str) -> str:
        """Return an expression for a literal text, which may contain control tokens."""
        parts = [part for part in self._tokens.split(text) if part]
        written = (f"<[{self._control[part]}]>" if part in self._control else literal(part) for part in parts)
        return " ".join(written) or '""'

    def until(self, text: str) -> str:
        """Return an expression for any text that ends with the first occurrence of `text`."""
        if self._tokens.match(text):
            return f"{self.rule(_ANYTHING)} {self.text(text)}"
        first_part, *rest = [part for part in self._tokens.split(text) if part]
        ending = self.rule(f"{_ANYTHING[:-1]}{_escaped(first_part)}/", "[lazy]")
        return f"{ending} {self.text(''.join(rest))}"

    def marked_text(self, mark: str, follower: str, times: str) -> str:
        """Return an expression for any text in which `follower` follows each `mark`. `times` quantifies the marks."""
        if mark in self._control:
            anything = self.none_of(mark)
            return f"({anything} {self.text(mark)} {follower}){times} {anything}"
        up_to_mark = self.rule(f"{_ANYTHING[:-1]}{_escaped(mark)}/", "[lazy]")
        return f"({up_to_mark} {follower}){times} {self.rule(_ANYTHING)}"

    def none_of(self, mark: str) -> str:
        """Return an expression for any sequence of tokens without the given control token."""
        return self.rule(f"<[^{self._control[mark]}]>*")

    def first_part(self, text: str) -> str:
        """Return the control token at the start of a text, or else the text before the first control token."""
        return next((part for part in self._tokens.split(text) if part), "")

    def json(self, schema: Mapping[str, Json], *, lenient: bool, path: str) -> str:
        """Return an expression for JSON that matches a schema. `path` is the path of the schema in errors."""
        schema = {**schema, "x-guidance": {**_GUIDANCE, "lenient": lenient, "path": path}}
        return self.rule(f"%json {json.dumps(schema, ensure_ascii=False)}")

    def any_of(self, expressions: Sequence[str]) -> str:
        return self.rule(" | ".join(expressions))


def _escaped(text: str) -> str:
    """Escape a text for a regular expression between slashes."""
    return "".join("\\n" if character == "\n" else re.escape(character).replace("/", "\\/") for character in text)
