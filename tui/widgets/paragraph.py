"""A paragraph in a reply."""

from functools import cache

from textual.content import Content
from textual.style import Style
from textual.widget import Widget
from textual.widgets._markdown import MarkdownParagraph

from tui.widgets.growing import grown, size_by_layout


class Paragraph(MarkdownParagraph):
    """While it grows, it is drawn anew and seldom laid out anew. How its words look is asked of what it stands in."""

    virtual_size = size_by_layout()

    @classmethod
    @cache
    def _get_component_classes(cls) -> frozenset[str]:
        """None of its own: they would be looked up for each paragraph."""
        return frozenset()

    def _get_style(self, style: Style | str) -> Style:
        parent = self.parent
        return parent._get_style(style) if isinstance(parent, Widget) else Style()  # removed, but seen once more

    def set_content(self, content: Content) -> None:
        self._content = content
        self.update(content, layout=False)
        grown(self)
