"""Text fields that sanitize pasted text, and lines with clickable words."""

from textual.content import Content
from textual.events import Key, Paste
from textual.style import Style
from textual.widget import Widget
from textual.widgets import Input, Label, TextArea

from tui.plain_text import sanitize_paste


async def run_binding(field: Widget, event: Key) -> None:
    """Run the field's own binding of a key immediately.

    Textual passes such a key through the app first, and later keys would overtake it.
    """
    for binding in field._bindings.key_to_bindings.get(event.key, ()):
        if await field.app.run_action(binding.action, field):
            event.stop()
            event.prevent_default()
            return


class TextField(TextArea):
    """Several lines."""

    async def _on_key(self, event: Key) -> None:
        if not event.is_printable:
            await run_binding(self, event)

    async def _on_paste(self, event: Paste) -> None:
        event.prevent_default()
        event.stop()
        await super()._on_paste(Paste(sanitize_paste(event.text)))


class LineField(Input):
    """One line. Pasted line breaks become spaces."""

    async def _on_key(self, event: Key) -> None:
        if not event.is_printable:
            await run_binding(self, event)

    def _on_paste(self, event: Paste) -> None:
        event.prevent_default()
        event.stop()
        super()._on_paste(Paste(sanitize_paste(event.text).strip("\n").replace("\n", " ")))


class WordButtons(Label):
    """A line with clickable words, made with `word`."""

    def __init__(self, content: Content | str = "", *, id: str | None = None, classes: str | None = None) -> None:  # noqa: A002
        super().__init__(content, id=id, classes=classes, markup=False)

    async def action_ask(self, action: str) -> None:
        await self.app.run_action(action, self.parent)


def word(text: str, action: str) -> Content:
    """Return a word that runs an action of its line's parent when it is clicked."""
    return Content.styled(text, Style.from_meta({"@click": f"ask({action!r})"}) + Style(underline=True))
