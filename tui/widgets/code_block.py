"""A block of code in a reply: its language, its text in colours, and two things to do with it. Nothing is ever run."""

from textual.app import ComposeResult
from textual.content import Content
from textual.message import Message
from textual.widgets import Label
from textual.widgets.markdown import MarkdownBlock, MarkdownFence

from tui.widgets.headroom import grown
from tui.widgets.word_buttons import WordButtons, word

LONGEST_HIGHLIGHTED = 20_000  # characters; what is longer stays in one colour, since all of it is read at each change


class CodeBlock(MarkdownFence):
    """A fence that can be copied and saved."""

    class CopyAsked(Message):
        def __init__(self, code: str) -> None:
            super().__init__()
            self.code = code

    class SaveAsked(Message):
        def __init__(self, code: str, language: str) -> None:
            super().__init__()
            self.code = code
            self.language = language

    @classmethod
    def highlight(cls, code: str, language: str, ansi: bool = False, dark: bool = False) -> Content:
        if len(code) > LONGEST_HIGHLIGHTED:
            return Content(code)
        return super().highlight(code, language, ansi, dark)

    def set_content(self, content: Content) -> None:
        self._content = content
        for shown in self.query("#code-content").results(Label):
            shown.update(content, layout=False)
            grown(shown)

    def compose(self) -> ComposeResult:
        yield WordButtons(self._bar(), classes="code-bar")
        yield from super().compose()

    def _bar(self) -> Content:
        language = self.lexer.split(" ")[0][:24] or "text"
        return Content.assemble((language, "dim"), "  ", word("copy", "copy"), "  ", word("save", "save"))

    def _copy_context(self, block: MarkdownBlock) -> None:
        before = self.lexer
        super()._copy_context(block)
        if self.lexer != before:
            self.query_one(WordButtons).update(self._bar())

    def action_copy(self) -> None:
        self.post_message(self.CopyAsked(self.code))

    def action_save(self) -> None:
        self.post_message(self.SaveAsked(self.code, self.lexer))
