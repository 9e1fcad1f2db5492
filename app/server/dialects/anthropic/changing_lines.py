"""Lines that clients add to a system prompt and change with every request, and that no model needs.

The prefix cache matches only up to a changed line, and these are near the start of the prompt. So they are removed, and
the cache report names them.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

# Name of the line in reports, and a pattern for the line.
_TABLE: Final[Sequence[tuple[str, str]]] = (("x-anthropic-billing-header", r"x-anthropic-billing-header:[^\n]*"),)


@dataclass(frozen=True, slots=True)
class RemainingTexts:
    """Texts without the removed lines, and the names of these lines."""

    texts: Sequence[str]
    left_out: tuple[str, ...]  # names of the removed lines


class ChangingLines:
    """Removes lines by a table of names and patterns. A pattern matches a whole line."""

    def __init__(self, table: Sequence[tuple[str, str]] = _TABLE) -> None:
        self._patterns = [(name, re.compile(rf"^(?:{line})(?:\n|\Z)", re.MULTILINE)) for name, line in table]

    def remove_from(self, texts: Iterable[str]) -> RemainingTexts:
        """Return the texts without these lines. A text that becomes empty is dropped."""
        remaining, found = [], set[str]()
        for text in texts:
            rest = text
            for name, pattern in self._patterns:
                rest, count = pattern.subn("", rest)
                found |= {name} if count else set()
            if rest or not text:
                remaining.append(rest)
        return RemainingTexts(remaining, tuple(name for name, _ in self._patterns if name in found))


CHANGING_LINES: Final = ChangingLines()
KEEP_ALL_LINES: Final = ChangingLines(())  # removes nothing
