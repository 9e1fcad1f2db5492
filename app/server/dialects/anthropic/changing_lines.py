"""Lines that clients put into a system prompt and change with every request, though no model has a use for them.

What follows a line that changed has to be computed again, which here is the whole prompt: so they are left out, and the
cache report says which. A table; refuses to know where prompts come from.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

# What each is called in reports, and how its lines look.
_TABLE: Final[Sequence[tuple[str, str]]] = (("x-anthropic-billing-header", r"x-anthropic-billing-header:[^\n]*"),)


@dataclass(frozen=True, slots=True)
class RemainingTexts:
    """What stays of some texts."""

    texts: Sequence[str]
    left_out: tuple[str, ...]  # the names of lines that do not


class ChangingLines:
    """The lines of a table: by what they are called, and the pattern that each of them matches whole."""

    def __init__(self, table: Sequence[tuple[str, str]] = _TABLE) -> None:
        self._patterns = [(name, re.compile(rf"^(?:{line})(?:\n|\Z)", re.MULTILINE)) for name, line in table]

    def remove_from(self, texts: Iterable[str]) -> RemainingTexts:
        """Texts without these lines; one of which nothing is left is left out, too."""
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
KEEP_ALL_LINES: Final = ChangingLines(())  # all is kept
