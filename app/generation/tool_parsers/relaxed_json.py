"""Converts JSON as models write it to valid JSON, while it is streamed.

Valid JSON is unchanged. Known deviations are converted: line breaks in strings, Python's words and quotes, unquoted
names, missing or superfluous commas, and Gemma's string marks. The output is always a prefix of valid JSON, and
complete when the value is done. Parsing takes time linear in the length of the text.
"""

import json
import re
from enum import Enum, auto

STRING_MARKS = ('<|"|>', "<escape>")  # marks around strings without escapes: Gemma 4, FunctionGemma

# keys: the quote of a string; values: the characters that need attention in such a string
_SPECIAL = {'"': re.compile(r"[\x00-\x1f\"\\]"), "'": re.compile(r"[\x00-\x1f\"\\']")}
_NOT_SPACE = re.compile(r"\S")
_WORD_END = re.compile(r"[\s,:\[\]{}()\"'<]")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_WORDS = {"true": "true", "True": "true", "false": "false", "False": "false", "null": "null", "None": "null"}
_SAME_ESCAPES = frozenset('"\\/bfnrt')
_HEX_ESCAPES = {"u": 4, "x": 2}
_AFTER_STRING = frozenset(",)]}:")
_CLOSING = {"{": "}", "[": "]"}
MAX_DEPTH = 64
MAX_WORD = 512  # maximum length of a number or an unquoted name in characters


class _Expects(Enum):
    VALUE = auto()
    ITEM = auto()  # an item, or the end of a list
    KEY = auto()  # a key, or the end of an object
    COLON = auto()
    COMMA = auto()  # a comma, or the end of a list or an object


class RelaxedJson:
    """Converts one value to valid JSON. `feed` returns how much of a text belongs to the value."""

    def __init__(self) -> None:
        self.done = False
        self.failed = False
        self._open: list[str] = []  # brackets that are open, outermost first
        self._expects = _Expects.VALUE
        self._comma = ""  # a comma that is held back, because the list or object may end
        self._quote: str = ""  # mark that ends the current string; "" outside of strings
        self._out: list[str] = []

    @property
    def over(self) -> bool:
        return self.done or self.failed

    def feed(self, text: str, start: int = 0, *, final: bool = False) -> tuple[int, str]:
        """Return the position up to which `text` was parsed, starting at `start`, and the JSON of the parsed part.

        The rest must be fed again with the following text. `final` means that no text follows.
        """
        position = start
        while position < len(text) and not self.over:
            step = self._string if self._quote else self._structure
            reached = step(text, position, final)
            if reached == position and not self.over:
                break
            position = reached
        out, self._out = "".join(self._out), []
        return position, out

    # -- steps: each returns the new position, or the same one if it needs more text

    def _structure(self, text: str, position: int, final: bool) -> int:
        character = text[position]
        if character.isspace():
            if self._comma:
                self._comma += character
            elif self._open:
                self._out.append(character)
            return position + 1
        if character in "}]" and self._open:
            return self._close(character, position)
        if character == "," and self._expects is _Expects.COMMA:
            self._comma = ","
            self._expects = _Expects.KEY if self._open[-1] == "{" else _Expects.ITEM
            return position + 1
        if character == ":" and self._expects is _Expects.COLON:
            self._out.append(":")
            self._expects = _Expects.VALUE
            return position + 1
        if character in ",:)" or self._expects is _Expects.COLON:
            return self._fail(position)
        return self._member(text, position, final)

    def _close(self, character: str, position: int) -> int:
        if character != _CLOSING[self._open[-1]] or self._expects in (_Expects.COLON, _Expects.VALUE):
            return self._fail(position)
        self._open.pop()
        self._out.append(self._comma[1:] + character)
        self._comma = ""
        self._after_value()
        return position + 1

    def _member(self, text: str, position: int, final: bool) -> int:
        """Parse the start of a value or of an object's key."""
        opening = self._opening(text, position, final)
        if opening is None:
            return position
        if self._expects is _Expects.COMMA:  # the comma before the value or name is missing
            self._comma = ","
            self._expects = _Expects.KEY if self._open[-1] == "{" else _Expects.ITEM
        if opening in _CLOSING:
            return self._fail(position) if self._expects is _Expects.KEY else self._open_bracket(opening, position)
        if opening:
            self._begin('"')
            self._quote = opening
            return position + len(opening)
        return self._word(text, position, final)

    def _opening(self, text: str, position: int, final: bool) -> str | None:
        """Return the bracket or string mark at `position`; "" for a word; None if more text is needed."""
        if text[position] in "{[\"'":
            return text[position]
        for mark in STRING_MARKS:
            if text.startswith(mark, position):
                return mark
            if not final and mark.startswith(text[position : position + len(mark)]):
                return None
        return ""

    def _open_bracket(self, opening: str, position: int) -> int:
        if len(self._open) == MAX_DEPTH:
            return self._fail(position)
        self._begin(opening)
        self._open.append(opening)
        self._expects = _Expects.KEY if opening == "{" else _Expects.ITEM
        return position + 1

    def _word(self, text: str, position: int, final: bool) -> int:
        end = _WORD_END.search(text, position)
        if end is None and not final:
            return position if len(text) - position <= MAX_WORD else self._fail(position)
        word = text[position : end.start() if end else len(text)]
        if not word or len(word) > MAX_WORD:
            return self._fail(position)
        if self._expects is _Expects.KEY:
            self._begin(json.dumps(word, ensure_ascii=False))
        else:
            known = _WORDS.get(word) or (word if _NUMBER.fullmatch(word) else None)
            self._begin(json.dumps(word, ensure_ascii=False) if known is None else known)
        self._after_string()
        return position + len(word)

    def _string(self, text: str, position: int, final: bool) -> int:
        if self._quote not in _SPECIAL:
            return self._marked_string(text, position, final)
        special = _SPECIAL[self._quote].search(text, position)
        end = special.start() if special else len(text)
        if end > position:
            self._out.append(text[position:end])
            return end
        if text[position] == "\\":
            return self._escape(text, position)
        if text[position] != self._quote:
            self._out.append(json.dumps(text[position])[1:-1])
            return position + 1
        if self._quote == "'":
            return self._single_quote(text, position, final)
        self._out.append('"')
        self._after_string()
        return position + 1

    def _single_quote(self, text: str, position: int, final: bool) -> int:
        """Parse a single quote. The text after it decides whether it ends the string or is an unescaped apostrophe."""
        after = _NOT_SPACE.search(text, position + 1)
        if after is None and not final:
            return position
        if after is None or after.group() in _AFTER_STRING:
            self._out.append('"')
            self._after_string()
        else:
            self._out.append("'")
        return position + 1

    def _marked_string(self, text: str, position: int, final: bool) -> int:
        end = text.find(self._quote, position)
        if end < 0:
            held = 0 if final else longest_overlap(text, position, self._quote)
            self._out.append(json.dumps(text[position : len(text) - held], ensure_ascii=False)[1:-1])
            return len(text) - held
        self._out.append(json.dumps(text[position:end], ensure_ascii=False)[1:-1] + '"')
        end += len(self._quote)
        self._after_string()
        return end

    def _escape(self, text: str, position: int) -> int:
        if position + 1 == len(text):
            return position
        letter = text[position + 1]
        if digits := _HEX_ESCAPES.get(letter):
            code = text[position + 2 : position + 2 + digits]
            if all(digit in "0123456789abcdefABCDEF" for digit in code):
                if len(code) < digits:
                    return position
                self._out.append(f"\\u{code:0>4}")
                return position + 2 + digits
        if letter in _SAME_ESCAPES:
            self._out.append("\\" + letter)
        elif letter == "'":
            self._out.append("'")
        else:
            self._out.append("\\\\")
            return position + 1
        return position + 2

    # -- state changes of a step

    def _begin(self, out: str) -> None:
        self._out.append(self._comma + out)
        self._comma = ""

    def _after_string(self) -> None:
        self._quote = ""
        if self._expects is _Expects.KEY:
            self._expects = _Expects.COLON
        else:
            self._after_value()

    def _after_value(self) -> None:
        self._expects = _Expects.COMMA
        self.done = not self._open

    def _fail(self, position: int) -> int:
        self.failed = True
        return position


def longest_overlap(text: str, start: int, mark: str) -> int:
    """Return the length of the longest end of `text`, from `start` on, that is a proper prefix of `mark`."""
    most = min(len(mark) - 1, len(text) - start)
    return next((size for size in range(most, 0, -1) if text.endswith(mark[:size])), 0)


def as_json(text: str) -> str | None:
    """Return the JSON of a text that is a single value as models write it, or None if it is not."""
    value = RelaxedJson()
    reached, out = value.feed(text, final=True)
    return out.strip() if value.done and not text[reached:].strip() else None
