r"""Markup: a sequence of literals and holes, matched against text that arrives in pieces.

    <function={name}>\n      a literal, a hole, a literal, and optional white space

A match never looks at text after its own characters.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

_PART = re.compile(r"\{(\w+)\}|(\s+)|((?:[^{\s]|\{(?!\w+\}))+)")
_NEVER_IN_NAMES = r"\s<>\[\]{}()\"'|=,｜"
MAX_HOLE = 256  # maximum length of the text in a hole, in characters


@dataclass(frozen=True, slots=True)
class Literal:
    text: str


@dataclass(frozen=True, slots=True)
class Space:
    """Optional white space. `text` is the white space that models write; any amount matches."""

    text: str


@dataclass(frozen=True, slots=True)
class Hole:
    """A hole that a name fills or, if `any` is set, all text up to the next literal."""

    name: str
    pattern: re.Pattern[str] = field(compare=False)


Part = Literal | Space | Hole


class NotYet(Enum):
    """The result of a match that needs more text."""

    WAIT = auto()


WAIT = NotYet.WAIT


@dataclass(frozen=True, slots=True)
class Found:
    end: int  # end of the match in the text
    holes: Mapping[str, str]


class Markup:
    """One sequence of literals and holes. Immutable."""

    def __init__(self, written: str) -> None:
        self.written = written
        found = list(_PART.finditer(written))
        self.parts = tuple(_part(one[1], one[2], one[3], found[index + 1 :]) for index, one in enumerate(found))

    @functools.cached_property
    def first(self) -> str:
        """The literal at the start of every match. Empty if the markup starts with a hole."""
        part = self.parts[0] if self.parts else None
        return part.text if isinstance(part, Literal) else ""

    @property
    def literals(self) -> Sequence[str]:
        return [part.text for part in self.parts if isinstance(part, Literal)]

    def filled(self, **holes: str) -> str:
        """Return the markup with its holes filled, up to the first hole without a value."""
        filled = self.parts[: self.filled_parts(**holes)]
        return "".join(holes[part.name] if isinstance(part, Hole) else part.text for part in filled)

    def filled_parts(self, **holes: str) -> int:
        """Return the number of parts before the first hole without a value."""
        unknown = (i for i, part in enumerate(self.parts) if isinstance(part, Hole) and part.name not in holes)
        return next(unknown, len(self.parts))

    def match(
        self, text: str, start: int, *, final: bool = False, known: Mapping[str, str] | None = None
    ) -> Found | NotYet | None:
        """Match the sequence at `start`.

        `final` means that no text follows. Holes in `known` must have the same text.
        """
        position, holes = start, dict(known or {})
        for number, own in enumerate(self.parts):
            part = Literal(holes[own.name]) if isinstance(own, Hole) and own.name in holes else own
            if isinstance(part, Literal):
                reached = _literal(text, position, part.text, final)
            elif isinstance(part, Space):
                reached = _space(text, position, final, last=number == len(self.parts) - 1)
            else:
                reached = _hole(text, position, part, final)
                if isinstance(reached, int):
                    holes[part.name] = text[position:reached].strip()
            if not isinstance(reached, int):
                return reached
            position = reached
        return Found(position, holes)


def _part(hole: str | None, space: str | None, literal: str | None, rest: Sequence[re.Match[str]]) -> Part:
    if hole is None:
        return Space(space) if space else Literal(literal or "")
    following = next((one[3] for one in rest if one[3]), "")
    if hole == "any":
        return Hole(hole, re.compile(rf"(?:(?!{re.escape(following)}).)*" if following else ".*", re.DOTALL))
    never = r"\n" if hole == "key" else _NEVER_IN_NAMES
    before = f"(?!{re.escape(following[0])})" if following else ""
    return Hole(hole, re.compile(rf"(?:{before}[^{never}])+"))


def _literal(text: str, position: int, literal: str, final: bool) -> int | NotYet | None:
    if text.startswith(literal, position):
        return position + len(literal)
    is_partial = not final and len(text) - position < len(literal) and literal.startswith(text[position:])
    return WAIT if is_partial else None


_SPACES = re.compile(r"\s*")


def _space(text: str, position: int, final: bool, *, last: bool) -> int | NotYet:
    match = _SPACES.match(text, position)
    end = match.end() if match else position
    return end if last or final or end < len(text) else WAIT


def _hole(text: str, position: int, hole: Hole, final: bool) -> int | NotYet | None:
    match = hole.pattern.match(text, position)
    end = match.end() if match else position
    if end - position > MAX_HOLE:
        return None
    if end == len(text) and not final:
        return WAIT
    return end if match else None
