"""A code block in a reply, with syntax highlighting and links to copy or save it. Code is never executed."""

from collections.abc import Iterator
from functools import cache, lru_cache

from markdown_it.token import Token
from pygments.token import Token as Kind  # type: ignore[import-untyped]
from textual.app import ComposeResult
from textual.content import Content
from textual.highlight import ANSIDarkHighlightTheme, ANSILightHighlightTheme, HighlightTheme, highlight
from textual.message import Message
from textual.widgets import Label, Markdown

from tui.markdown import LONGEST_LINE
from tui.plain_text import head
from tui.widgets.growing import draw_growth, release_reserve
from tui.widgets.markdown_internals import Fence
from tui.widgets.text_fields import SplitLine, word

LONGEST_HIGHLIGHTED = 20_000  # maximum number of characters of code that is highlighted
_PART, _LONGEST_PART = 1500, 4000  # characters after which a part may end, and after which it must end


class CodeBlock(Fence):
    """A code block with links to copy, save, and wrap its code."""

    class CopyAsked(Message):
        def __init__(self, code: str) -> None:
            super().__init__()
            self.code = code

    class SaveAsked(Message):
        def __init__(self, code: str, language: str) -> None:
            super().__init__()
            self.code = code
            self.language = language

    def __init__(self, markdown: Markdown, token: Token, code: str) -> None:
        super().__init__(markdown, token, code)
        self._shown: list[Content] = []

    @classmethod
    def highlight(cls, code: str, language: str, ansi: bool = False, dark: bool = False) -> Content:
        """Return the code without colors, because `compose` highlights each part separately."""
        return Content(code)

    def compose(self) -> ComposeResult:
        yield SplitLine(*self._bar(), classes="code-bar")
        self._shown = self._parts()
        yield from map(CodePart, self._shown)

    def show_code(self, content: Content) -> None:
        if self._shown:  # otherwise `compose` will show the current code
            self._show_changes()

    def _show_changes(self) -> None:
        """Update only the parts that changed, so that the other parts keep their layout."""
        labels = list(self.query_children(CodePart))
        before, self._shown = self._shown, self._parts()
        for label, was, part in zip(labels, before, self._shown, strict=False):
            if was is not part:
                label.update(part, layout=False)
                draw_growth(label)
        for label in labels[len(self._shown) :]:
            label.remove()
        if added := self._shown[len(labels) :]:
            for label in labels[-1:]:
                release_reserve(label)
            self.mount_all(map(CodePart, added))

    def _parts(self) -> list[Content]:
        if len(self.code) > LONGEST_HIGHLIGHTED:
            return [_plain(part) for part in parts(self.code)]
        theme = self.app.native_ansi_color, self.app.current_theme.dark
        return [_highlighted(part, self.lexer, *theme) for part in parts(self.code)]

    def _bar(self) -> tuple[Content, Content]:
        language = self.lexer.split(" ")[0][:24] or "text"
        words = word("copy", "copy"), word("save", "save"), word("unwrap" if self.is_wrapped else "wrap", "wrap")
        return Content(language), Content("  ").join(words)

    def show_language(self) -> None:
        for bar in self.query_children(SplitLine):  # none before it is composed
            bar.show(*self._bar())

    @property
    def is_wrapped(self) -> bool:
        """Whether long lines are wrapped. Otherwise they end at the edge with "…"."""
        return self.has_class("-wrapped")

    def wrap(self, wrapped: bool) -> None:
        """Wrap long lines, or cut them at the edge."""
        self.set_class(wrapped, "-wrapped")
        self.show_language()

    def action_wrap(self) -> None:
        self.wrap(not self.is_wrapped)

    def action_copy(self) -> None:
        self.post_message(self.CopyAsked(self.code))

    def action_save(self) -> None:
        self.post_message(self.SaveAsked(self.code, self.lexer))


def parts(code: str) -> Iterator[str]:
    """Split code into parts that are highlighted separately, so that growing code does not highlight finished parts
    again.

    A part ends before an unindented line that follows an empty line, or when it exceeds the maximum size.
    """
    part: list[str] = []
    size, is_after_empty = 0, False
    for line in code.split("\n"):
        if size > _LONGEST_PART or (size > _PART and is_after_empty and not line[:1].isspace()):
            yield "\n".join(part)
            part, size = [], 0
        part.append(line)
        size += len(line) + 1
        is_after_empty = not line.strip()
    yield "\n".join(part)


class CodePart(Label):
    """A part of the code. Its lines are wrapped or cut, as the style `text-wrap` says."""

    def __init__(self, part: Content) -> None:
        super().__init__(part, classes="code-part", expand=True)
        self._laid_out = ""

    def notify_style_update(self) -> None:
        """Lay the part out again when lines are wrapped or cut: Textual does not."""
        super().notify_style_update()
        if self._laid_out != self.styles.text_wrap:
            self._laid_out = self.styles.text_wrap
            self.clear_cached_dimensions()
            self.refresh(layout=True)


@lru_cache(maxsize=256)
def _highlighted(part: str, language: str, ansi: bool, dark: bool) -> Content:
    text = _without_long_lines(part)
    inner = text.strip("\n")  # the highlighter strips empty lines at both ends
    before, _, after = text.partition(inner) if inner else (text, "", "")
    return Content.assemble(before, _colored(inner, language, ansi, dark) if inner else "", after)


def _colored(code: str, language: str, ansi: bool, dark: bool) -> Content:
    base = (ANSIDarkHighlightTheme if dark else ANSILightHighlightTheme) if ansi else HighlightTheme
    return highlight(code, language=language or None, theme=_with_diff_colors(base))


@cache
def _with_diff_colors(base: type[HighlightTheme]) -> type[HighlightTheme]:
    """Return a theme that also has colors for the lines of a diff."""
    diff = {Kind.Generic.Inserted: "$text-success", Kind.Generic.Deleted: "$text-error"}
    return type("DiffTheme", (base,), {"STYLES": {**base.STYLES, **diff}})


@lru_cache(maxsize=256)
def _plain(part: str) -> Content:
    return Content(_without_long_lines(part))


def _without_long_lines(part: str) -> str:
    """Shorten long lines for display. Copying and saving use the full code."""
    return "\n".join(head(line, LONGEST_LINE) for line in part.split("\n"))
