"""A line in which some words are buttons. What they do are actions of the widget that the line is part of."""

from textual.content import Content
from textual.style import Style
from textual.widgets import Label


class WordButtons(Label):
    """A line with such words; made with `word`."""

    def __init__(self, content: Content | str = "", *, id: str | None = None, classes: str | None = None) -> None:  # noqa: A002
        super().__init__(content, id=id, classes=classes, markup=False)

    async def action_ask(self, action: str) -> None:
        await self.app.run_action(action, self.parent)


def word(text: str, action: str) -> Content:
    """A word that runs an action of the parent of its line."""
    return Content.styled(text, Style.from_meta({"@click": f"ask({action!r})"}) + Style(underline=True))
