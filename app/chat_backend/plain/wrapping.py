"""Wraps the text of a reply between words, because a terminal breaks words at its edge."""

import re
from unicodedata import combining, east_asian_width

_WORDS = re.compile(r"\n|[^\S\n]+|\S+")
_FENCE = "```"


class Wrapping:
    """Inserts line breaks into text that arrives in whole words. Lines of code blocks stay as they are.

    `width`: number of cells in a line of the terminal. None: the text is not changed.
    """

    def __init__(self, width: int | None) -> None:
        self._width = width
        self._column = 0
        self._space = ""  # white space that is written only if a word follows on the same line
        self._is_code = False

    def wrap(self, text: str) -> str:
        """Return the next part of the text, with line breaks."""
        if self._width is None:
            return text
        return "".join(self._next(part, self._width) for part in _WORDS.findall(text))

    def _next(self, part: str, width: int) -> str:
        if part == "\n":
            self._column, self._space = 0, ""
            return part
        if part.isspace():
            self._space += part
            return ""
        if not self._column and part.startswith(_FENCE):
            self._is_code = not self._is_code
        cells = _cells(part)
        is_over = self._column and self._column + len(self._space) + cells > width and not self._is_code
        before, self._space = "\n" if is_over else self._space, ""
        self._column = cells if is_over else self._column + len(before) + cells
        return before + part


def _cells(word: str) -> int:
    """Return the width of a word in cells."""
    return sum(2 if east_asian_width(one) in "WF" else not combining(one) for one in word)
