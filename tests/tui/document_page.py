"""An application that shows one document of a reply, for tests."""

from textual.app import App, ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import Markdown

from tui.widgets.document import Document


class DocumentPage(App[None]):
    """Shows a document, and records clicks on its links."""

    CSS = "VerticalScroll { scrollbar-gutter: stable; }"

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text
        self.clicked: list[str] = []

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Document(self._text)

    def on_markdown_link_clicked(self, event: Markdown.LinkClicked) -> None:
        self.clicked.append(event.href)
