"""How a model's Markdown is read: no HTML, and every link says where it goes. And where a long text can be cut.

Pure functions over text and tokens; knows no widget.
"""

import re
from collections.abc import Iterator
from functools import cache

from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from markdown_it.token import Token

from tui.plain_text import sanitize

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
PIECE = 1500  # characters; from here on a text is cut where it can be
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


class Pieces:
    """A growing text, cut into pieces that mean the same apart as together (but for link references).

    A cut is made in front of a line that begins a new block: behind an empty line, not indented, not part of a list,
    outside of fences. A line that is too long is cut as well, and goes on as a paragraph.
    """

    def __init__(self) -> None:
        self._fence = ""  # what closes the fence that is open
        self._length = 0  # of the piece that is open
        self._after_empty = False
        self._line = ""  # the begin of a line that has not ended

    def feed(self, text: str) -> Iterator[tuple[bool, str]]:
        """Parts of `text` in order, each with whether it begins a new piece. Together they are `text`."""
        start = 0
        for line_start, line in _lines(text, goes_on=len(self._line) >= LONGEST_LINE):
            is_too_long = self._is_too_long(line)
            whole = line if is_too_long else self._line + line
            if is_too_long or (self._may_cut(whole) and not self._line):
                if text[start:line_start]:
                    yield False, text[start:line_start]
                yield True, line
                start, self._length = line_start + len(line), 0
            self._length += len(line)
            if line.endswith("\n"):
                self._end_line(whole)
                self._line = ""
            else:
                self._line = whole
        if text[start:]:
            yield False, text[start:]

    def _is_too_long(self, rest: str) -> bool:
        """The line that has not ended, so that its rest is apart from it: between two words, if it has any."""
        length = len(self._line)
        between = self._line.endswith(" ") or rest.startswith(" ")
        return not self._fence and (length >= LONGEST_LINE + PIECE or (between and length >= LONGEST_LINE))

    def _may_cut(self, line: str) -> bool:
        first = line[:1]
        return (
            self._length >= PIECE
            and self._after_empty
            and not self._fence
            and (first.isalpha() or first == "#" or line.startswith("```"))
        )

    def _end_line(self, line: str) -> None:
        self._after_empty = not line.strip()
        found = _FENCE.match(line)
        if found and not self._fence:
            self._fence = found[1]
        elif found and found[1].startswith(self._fence) and not line[found.end() :].strip():
            self._fence = ""


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
