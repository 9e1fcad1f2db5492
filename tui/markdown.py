"""Parses the Markdown of replies, and splits long texts into pieces.

HTML is shown as text, and the targets of links are visible.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token

from tui.math_text import to_unicode
from tui.plain_text import sanitize

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
# the text must start with a word or markup: "- - -" is a horizontal rule, not an item
_ITEM = re.compile(r"(?:(\d{1,9})([.)])|([-*+])) +(?:\w|\*\*|[`\[\"'(])")
_WITH_A_LINE_ABOVE = re.compile(r"#{1,6} |```")  # headings and code blocks are drawn with an empty line above
_TASK = re.compile(r"\[([ xX])\] ")
_BOXES = {" ": "☐ ", "x": "☑ ", "X": "☑ "}
# math between \( \), \[ \], $$ $$, or $ $. In $ $, no space at the ends and no digit after it: "$5 and $6" are prices
_MATH = re.compile(r"\\\((.+?)\\\)|\\\[(.+?)\\\]|\$\$(.+?)\$\$|\$(?! )((?:\\.|[^$\n\\])+?)(?<! )\$(?!\d)", re.DOTALL)
_PRODUCT = re.compile(r"(?<=\d)\*{1,2}(?=\d)")
_BELOW_HEADER = re.compile(r"[|:\- \t]*-[|:\- \t]*")
_EMOJI_STYLE = "\ufe0f"  # after a character that is also shown as text
PIECE = 1500  # characters after which a text is split at the next opportunity
_LONGEST_PIECE = 20 * PIECE  # characters after which a piece is split before any line outside of code
_SHORTEST_LINE = 30  # a shorter line counts as this many characters, because it takes a whole line on the screen
LONGEST_LINE = 3000  # characters after which a line is split; only a model stuck in a loop writes such a line


@cache
def parser() -> MarkdownIt:
    """Return a parser of GitHub's Markdown that shows HTML as text, and math as Unicode."""
    reader = MarkdownIt("gfm-like", {"html": False})
    reader.inline.add_terminator_char("$")
    reader.inline.ruler.before("escape", "math", _math)
    reader.inline.ruler.before("emphasis", "product", _product)
    reader.core.ruler.push("shown", _show)
    reader.core.ruler.push("boxes", _show_boxes)
    reader.core.ruler.push("cells", _narrow_emoji)
    return reader


def _show(state: StateCore) -> None:
    """Prepare parsed tokens for display.

    Adds the address after each link whose text differs from it, and after each image. Keeps single line breaks.
    Sanitizes decoded entities.
    """
    for token in state.tokens:
        for child in token.children or ():
            child.content = sanitize(child.content)
            child.type = "hardbreak" if child.type == "softbreak" else child.type
        if token.children:
            token.children = list(_with_addresses(token.children))


def _show_boxes(state: StateCore) -> None:
    """Replace "[ ]" and "[x]" at the start of list items with boxes."""
    for item, paragraph, text in zip(state.tokens, state.tokens[1:], state.tokens[2:], strict=False):
        if (item.type, paragraph.type) == ("list_item_open", "paragraph_open") and text.children:
            first = text.children[0]
            if found := _TASK.match(first.content):
                first.content = _BOXES[found[1]] + first.content[found.end() :]


def _narrow_emoji(state: StateCore) -> None:
    """Remove emoji variation selectors from cells of tables: terminals disagree on the width of such an emoji."""
    for cell, text in pairwise(state.tokens):
        if cell.type in ("th_open", "td_open"):
            for child in text.children or ():
                child.content = child.content.replace(_EMOJI_STYLE, "")


def _math(state: StateInline, silent: bool) -> bool:
    """Parse a formula, and add it as Unicode text. A rule of the parser: returns whether it matched."""
    found = _MATH.match(state.src, state.pos, state.posMax) if state.src[state.pos] in "\\$" else None
    if found is None:
        return False
    if not silent:
        state.push("text", "", 0).content = to_unicode(next(part for part in found.groups() if part is not None))
    state.pos = found.end()
    return True


def _product(state: StateInline, silent: bool) -> bool:
    """Keep the asterisks of 17*3 and 2**8, which CommonMark may take as emphasis. A rule of the parser."""
    found = _PRODUCT.match(state.src, state.pos, state.posMax)
    if found is None:
        return False
    if not silent:
        state.pending += found[0]
    state.pos = found.end()
    return True


def _with_addresses(tokens: list[Token]) -> Iterator[Token]:
    address, text = "", ""
    for token in tokens:
        yield token
        if token.type == "link_open":
            address, text = _keep_address(token, "href"), ""
        elif token.type == "image":
            yield _text(f" ({_keep_address(token, 'src')})")
        elif token.type == "link_close":
            if text.strip() not in (address, address.removeprefix("https://"), address.removeprefix("http://")):
                yield _text(f" ({address})")
        else:
            text += token.content


def _keep_address(token: Token, attribute: str) -> str:
    """Return the address of a token. In the token, escape it, because Textual's widget decodes it once."""
    address = sanitize(str(token.attrs.get(attribute, "")))
    token.attrs[attribute] = address.replace("%", "%25")
    return address


def _text(content: str) -> Token:
    return Token("text", "", 0, content=content)


@dataclass(frozen=True, slots=True)
class TextPart:
    """A part of a growing text."""

    text: str
    begins: bool = False  # whether it starts a new piece
    adjoins: bool = False  # whether the new piece follows without an empty line
    head: str = ""  # text to repeat at the start of the new piece: the header of a table that continues


class Pieces:
    """Splits a growing text into pieces that render alone as they do together, except for link references.

    A new piece starts at an unindented line after an empty line or after code, outside of fences. Lists are also split
    between items and tables between rows, because Textual parses a growing block again as a whole. A line over
    LONGEST_LINE is split as well, and continues as a paragraph. A piece over _LONGEST_PIECE is split before any line
    that is not code.
    """

    def __init__(self) -> None:
        self._fence = ""  # the marks that close the open fence
        self._length = 0  # length of the current piece in characters; short lines count as _SHORTEST_LINE
        self._between_blocks = True
        self._line = ""  # the current line, which has not ended
        self._before = ""  # the previous line
        self._header = ""  # header of the open table, with the delimiter row
        self._table = 0  # position of the open table in the piece
        self._item = _NO_ITEM  # last item of the open list

    def feed(self, text: str) -> Iterator[TextPart]:
        """Yield `text` in parts. Joined, the parts are equal to `text`."""
        start = 0
        for line_start, line in _lines(text, goes_on=len(self._line) >= LONGEST_LINE):
            cut = self._cut(line)
            if cut is not None:
                if text[start:line_start]:
                    yield TextPart(text[start:line_start])
                yield cut
                start, self._length, self._table = line_start + len(line), 0, 0
            whole = line if cut is not None else self._line + line
            self._length += len(line)
            if line.endswith("\n"):
                self._end_line(whole)
                self._line = ""
            else:
                self._line = whole
        if text[start:]:
            yield TextPart(text[start:])

    def _cut(self, line: str) -> TextPart | None:
        """Return the TextPart that starts a new piece at this line, or None if the line continues the current piece."""
        if self._is_too_long(line):
            return TextPart(line, begins=True, adjoins=True)
        if self._line or self._fence or self._length < PIECE:
            return None
        if self._header and self._length >= self._table + PIECE and line.startswith("|"):
            return TextPart(line, begins=True, adjoins=True, head=self._header)
        if self._item.is_before(_item(line)):
            return TextPart(line, begins=True, adjoins=True)
        brings_line = _WITH_A_LINE_ABOVE.match(line) is not None
        if self._between_blocks and (line[0].isalpha() or brings_line):
            return TextPart(line, begins=True, adjoins=brings_line)
        is_apart = self._length >= _LONGEST_PIECE and not line[0].isspace()
        return TextPart(line, begins=True, adjoins=True) if is_apart else None

    def _is_too_long(self, rest: str) -> bool:
        """Whether the unfinished line must be split before `rest`. It is split between two words if possible."""
        length = len(self._line)
        between = self._line.endswith(" ") or rest.startswith(" ")
        return not self._fence and (length >= LONGEST_LINE + PIECE or (between and length >= LONGEST_LINE))

    def _end_line(self, line: str) -> None:
        self._length += max(0, _SHORTEST_LINE - len(line))
        found = _FENCE.match(line)
        closes = bool(self._fence and found and found[1].startswith(self._fence) and not line[found.end() :].strip())
        if closes:
            self._fence = ""
        elif found and not self._fence:
            self._fence = found[1]
        elif not self._fence:
            self._note_table(line)
            self._note_list(line)
        self._between_blocks, self._before = closes or not line.strip(), line

    def _note_table(self, line: str) -> None:
        if not line.startswith("|"):
            self._header = ""
        elif not self._header and _BELOW_HEADER.fullmatch(line.rstrip()):
            read = parser().parse(self._before + line)
            self._header = self._before + line if read and read[0].type == "table_open" else ""
            self._table = self._length

    def _note_list(self, line: str) -> None:
        item = _item(line)
        if item is not _NO_ITEM and (self._between_blocks or self._item.is_before(item) or item.number in (None, 1)):
            self._item = item
        elif line.strip() and not line[0].isspace():
            self._item = _NO_ITEM


@dataclass(frozen=True, slots=True)
class _Item:
    """The marker of a list item at the left margin."""

    mark: str = ""  # the character after the number, or the bullet
    number: int | None = None

    def is_before(self, other: "_Item") -> bool:
        """Whether `other` continues this list, and would look the same in a separate list."""
        return bool(self.mark) and self.mark == other.mark and (self.number is None or other.number == self.number + 1)


_NO_ITEM = _Item()


def _item(line: str) -> _Item:
    found = _ITEM.match(line)
    if found is None:
        return _NO_ITEM
    return _Item(found[3]) if found[3] else _Item(found[2], int(found[1]))


def _lines(text: str, *, goes_on: bool) -> Iterator[tuple[int, str]]:
    """Yield lines with their positions. Long lines are split into parts, which end after a space if possible.

    With `goes_on`, the first word belongs to a long line of the previous text.
    """
    start = 0
    if goes_on and (end := text.partition("\n")[0].find(" ") + 1):
        yield 0, text[:end]
        start = end
    while start < len(text):
        end = text.find("\n", start) + 1 or len(text)
        if end - start > PIECE:
            end = text.rfind(" ", start, start + PIECE) + 1 or start + PIECE
        yield start, text[start:end]
        start = end
