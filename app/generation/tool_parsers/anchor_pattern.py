"""Converts the regular expressions of response templates to markup.

The patterns come with a model, so they are untrusted and never run. They are parsed for literals, names, and white
space. Any other pattern is refused as unsupported.
"""

import re
from collections.abc import Sequence
from typing import Final

MAX_PATTERN: Final = 512  # maximum length of a pattern in characters
MAX_ALTERNATIVES: Final = 16
_QUANTIFIER = re.compile(r"([*+?]|\{\d*,?\d*\})[?+]?")
_GROUP = re.compile(r"\((?:\?P?<(?P<name>[a-z_]+)>|\?:)?")
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]")
_WORD_CLASSES = "wdS"
_WHITE_SPACE = {"s": "\n", "n": "\n", "t": "\t", "r": "\n"}
_HOLE = re.compile(r"\{(\w+)\}")
_NEVER_LITERAL = "*+?{}["  # characters that are not valid as unescaped literals


class UnsupportedPattern(ValueError):
    """A pattern or field of a response template cannot be expressed as markup."""


def literal_markup(text: str) -> str:
    """Return the markup of a literal. Raises UnsupportedPattern if the literal contains hole syntax."""
    if not text or len(text) > MAX_PATTERN or _HOLE.search(text):
        raise UnsupportedPattern(f"the literal {text[:80]!r}")
    return text


def markup_of(pattern: str) -> Sequence[str]:
    """Return the alternatives of markup that a pattern matches, those with the fewest holes first.

    The markup has `{name}` for a group of that name, `{any}` for any text, and `{word}` for characters of one class.
    Raises UnsupportedPattern.
    """
    if len(pattern) > MAX_PATTERN:
        raise UnsupportedPattern(f"a pattern of {len(pattern):,} characters")
    reader = _Reader(pattern)
    found = {written.removeprefix("{any}").removeprefix("{word}") for written in reader.alternatives()} - {""}
    for written in found:
        holes = _HOLE.findall(written)
        if len(set(holes)) < len(holes):
            raise reader.problem()
    if not found or not reader.at_end:
        raise reader.problem()
    return sorted(found, key=lambda written: (written.count("{"), -len(written), written))


class _Reader:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._position = 0

    @property
    def at_end(self) -> bool:
        return self._position == len(self._pattern)

    def problem(self) -> UnsupportedPattern:
        return UnsupportedPattern(f"the pattern {self._pattern[:80]!r} at {self._position}")

    def alternatives(self) -> list[str]:
        found = self._sequence()
        while self._next == "|":
            self._position += 1
            found += self._sequence()
        return self._checked(found)

    @property
    def _next(self) -> str:
        return self._pattern[self._position : self._position + 1]

    def _checked(self, found: list[str]) -> list[str]:
        if len(found) > MAX_ALTERNATIVES:
            raise self.problem()
        return found

    def _sequence(self) -> list[str]:
        found = [""]
        while self._next not in ("", "|", ")"):
            piece = self._piece()
            found = self._checked([before + after for before in found for after in piece])
        return found

    def _piece(self) -> list[str]:
        """Parse one atom of a pattern, with its quantifier."""
        if group := _GROUP.match(self._pattern, self._position):
            return self._group(group)
        if self._pattern.startswith("\\", self._position):
            return self._escaped()
        if found := _CLASS.match(self._pattern, self._position):
            self._position = found.end()
            return self._repeated("{word}")
        character = self._next
        if character in _NEVER_LITERAL:
            raise self.problem()
        self._position += 1
        if character == ".":
            return self._repeated("{any}")
        return [""] if character in "^$" else self._optional([character])

    def _group(self, opened: re.Match[str]) -> list[str]:
        self._position = opened.end()
        inner = self.alternatives()
        if self._next != ")":
            raise self.problem()
        self._position += 1
        return self._optional([f"{{{opened['name']}}}"] if opened["name"] else inner)

    def _escaped(self) -> list[str]:
        character = self._pattern[self._position + 1 : self._position + 2]
        self._position += 2
        if character in _WHITE_SPACE:
            self._quantifier()
            return [_WHITE_SPACE[character]]
        if character in _WORD_CLASSES:
            return self._repeated("{word}")
        if not character or character.isalnum() or (character == "{" and (self._next or " ").isalnum()):
            raise self.problem()
        return self._optional([character])

    def _repeated(self, hole: str) -> list[str]:
        """Parse the quantifier of a character class. A repeated class becomes a hole."""
        quantifier = self._quantifier()
        if quantifier in ("", "?"):
            raise self.problem()
        return [hole] if hole == "{any}" or quantifier == "+" else [hole, ""]

    def _optional(self, found: list[str]) -> list[str]:
        quantifier = self._quantifier()
        if quantifier not in ("", "?"):
            raise self.problem()
        return [*found, ""] if quantifier else found

    def _quantifier(self) -> str:
        found = _QUANTIFIER.match(self._pattern, self._position)
        if found is None:
            return ""
        self._position = found.end()
        return found[1]
