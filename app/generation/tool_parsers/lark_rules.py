"""A grammar that is being written, rule by rule, in llguidance's dialect of Lark (its docs/syntax.md).

Control tokens, which plain text cannot spell, stand in it by their ids. Refuses to know what it is a grammar of.
"""

import json
import re
from collections.abc import Mapping, Sequence

from app.generation.conversation import Json
from app.grammars.lark import literal

_ANYTHING = "/(.|\\n)*/"
# As templates write JSON, so that the call, sent back, is encoded as it was generated.
_GUIDANCE: Mapping[str, Json] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class LarkRules:
    """The rules so far."""

    def __init__(self, control: Mapping[str, int]) -> None:
        self._control = control
        tokens = sorted((text for text in control if len(text) > 1), key=len, reverse=True)
        self._tokens = re.compile(f"({'|'.join(map(re.escape, tokens)) or '(?!)'})")
        self._names: dict[tuple[str, str], str] = {}  # of rules, by attributes and expression

    def start(self, expression: str) -> str:
        rules = (f"{name}{attributes}: {rule}" for (attributes, rule), name in self._names.items())
        return "\n".join((f"start: {expression}", *rules))

    def rule(self, expression: str, attributes: str = "") -> str:
        """The name of a rule, which is new unless there is one that says the same."""
        return self._names.setdefault((attributes, expression), f"r{len(self._names)}")

    def text(self, text: str) -> str:
        """A text as it stands, control tokens in it included."""
        parts = [part for part in self._tokens.split(text) if part]
        written = (f"<[{self._control[part]}]>" if part in self._control else literal(part) for part in parts)
        return " ".join(written) or '""'

    def until(self, text: str) -> str:
        """Anything, up to and with a text."""
        if self._tokens.match(text):
            return f"{self.rule(_ANYTHING)} {self.text(text)}"
        first_part, *rest = [part for part in self._tokens.split(text) if part]
        ending = self.rule(f"{_ANYTHING[:-1]}{_escaped(first_part)}/", "[lazy]")
        return f"{ending} {self.text(''.join(rest))}"

    def marked_text(self, mark: str, follower: str, times: str) -> str:
        """Anything, in which `follower` stands behind each `mark`, of which there may be several `times`."""
        if mark in self._control:
            anything = self.none_of(mark)
            return f"({anything} {self.text(mark)} {follower}){times} {anything}"
        up_to_mark = self.rule(f"{_ANYTHING[:-1]}{_escaped(mark)}/", "[lazy]")
        return f"({up_to_mark} {follower}){times} {self.rule(_ANYTHING)}"

    def none_of(self, mark: str) -> str:
        """Any tokens but a control token."""
        return self.rule(f"<[^{self._control[mark]}]>*")

    def first_part(self, text: str) -> str:
        """The control token that a text begins with, or all in front of one."""
        return next((part for part in self._tokens.split(text) if part), "")

    def json(self, schema: Mapping[str, Json], *, lenient: bool, path: str) -> str:
        """A value that fits a schema; `path` is what errors call it."""
        schema = {**schema, "x-guidance": {**_GUIDANCE, "lenient": lenient, "path": path}}
        return self.rule(f"%json {json.dumps(schema, ensure_ascii=False)}")

    def any_of(self, expressions: Sequence[str]) -> str:
        return self.rule(" | ".join(expressions))


def _escaped(text: str) -> str:
    """For a regular expression between slashes."""
    return "".join("\\n" if character == "\n" else re.escape(character).replace("/", "\\/") for character in text)
