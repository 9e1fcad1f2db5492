"""How a model's Markdown is read: no HTML, and every link says where it goes. And where a long text can be cut.

Pure functions over text and tokens; knows no widget.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from markdown_it.token import Token

from tui.plain_text import sanitize

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_ITEM = re.compile(r"(?:(\d{1,9})([.)])|([-*+])) +(?:\w|\*\*|[`\[\"'(])")  # a ruler of dashes or stars is none
_WITH_A_LINE_ABOVE = re.compile(r"#{1,6} |```")  # headings and code bring an empty one of their own
_BELOW_HEADER = re.compile(r"[|:\- \t]*-[|:\- \t]*")
PIECE = 1500  # characters; from here on a text is cut where it can be
_LONGEST_PIECE = 20 * PIECE  # from here on it is cut in front of any line that is not code
_SHORTEST_LINE = 30  # characters that a shorter line counts for, since it is as high
LONGEST_LINE = 3000  # characters; nobody writes such a line, but a model that is lost in a loop does


@cache
def parser() -> MarkdownIt:
    """GitHub's Markdown; what looks like HTML is text."""
    reader = MarkdownIt("gfm-like", {"html": False})
    reader.core.ruler.push("shown", _show)
    return reader


def _show(state: StateCore) -> None:
    """Behind a link whose text is not its address, write it; the same for images. And what entities stood for is shown,
    if it hides."""
    for token in state.tokens:
        for child in token.children or ():
            child.content = sanitize(child.content)
        if token.children:
            token.children = list(_with_addresses(token.children))


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
    """The address; kept so that one decoding by the widget gives it back as it is."""
    address = sanitize(str(token.attrs.get(attribute, "")))
    token.attrs[attribute] = address.replace("%", "%25")
    return address


def _text(content: str) -> Token:
    return Token("text", "", 0, content=content)


@dataclass(frozen=True, slots=True)
class TextPart:
    """Text of a growing one."""

    text: str
    begins: bool = False  # a new piece
    adjoins: bool = False  # that piece: no line is to be added in front of it
    head: str = ""  # what that piece begins with besides: a table that goes on has its header again


class Pieces:
    """A growing text, cut into pieces that mean the same apart as together (but for link references).

    A cut is made in front of a line that begins a new block: behind an empty line or code, not indented, outside of
    fences. Lists are cut between their items and tables between their rows, since one that grows is read again as a
    whole. A line that is too long is cut as well, and goes on as a paragraph; so is what long has had no such place.
    """

    def __init__(self) -> None:
        self._fence = ""  # what closes the fence that is open
        self._length = 0  # of the piece that is open
        self._between_blocks = True
        self._line = ""  # the begin of a line that has not ended
        self._before = ""  # the line before it
        self._header = ""  # of the table that is open, with the line below it
        self._table = 0  # where that begins in the piece
        self._item = _NO_ITEM  # the last one, of the list that is open

    def feed(self, text: str) -> Iterator[TextPart]:
        """Parts of `text`, in order and together all of it."""
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
        """What begins with this part of a line, where that is a new piece."""
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
        """The line that has not ended, so that its rest is apart from it: between two words, if it has any."""
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
    """The begin of one, at the left margin."""

    mark: str = ""  # what is behind a number, or the bullet
    number: int | None = None

    def is_before(self, other: "_Item") -> bool:
        """Whether the other one is the next of the same list, and looks like that in a list of its own."""
        return bool(self.mark) and self.mark == other.mark and (self.number is None or other.number == self.number + 1)


_NO_ITEM = _Item()


def _item(line: str) -> _Item:
    found = _ITEM.match(line)
    if found is None:
        return _NO_ITEM
    return _Item(found[3]) if found[3] else _Item(found[2], int(found[1]))


def _lines(text: str, *, goes_on: bool) -> Iterator[tuple[int, str]]:
    """Lines, and parts of long ones, which end behind a space where they can; each with its place. The first word is
    one where it `goes_on` with a long line."""
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
