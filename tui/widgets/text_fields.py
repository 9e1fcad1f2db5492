"""Text fields that sanitize pasted text, and lines with clickable words."""

from textual.content import Content
from textual.events import Key, Paste
from textual.style import Style
from textual.widget import Widget
from textual.widgets import Input, Label, TextArea

from tui.plain_text import sanitize_paste


async def run_binding(field: Widget, event: Key) -> None:
    """Run the field's own action for a key immediately.

    Textual passes such a key through the app first, and keys pressed later would overtake it.
    """
    for binding in field._bindings.key_to_bindings.get(event.key, ()):
        if await field.app.run_action(binding.action, field):
            event.stop()
            event.prevent_default()
            return


JOINERS = "\u200c\u200d"  # Python does not count them as printable, but emoji and some scripts need them


def _is_joiner(event: Key) -> bool:
    """Whether the key types a joiner, which Textual would ignore."""
    return event.character is not None and event.character in JOINERS


def _has_alt(event: Key) -> bool:
    """Whether the key is a combination with Alt, which types no character."""
    if event.key.startswith("alt+"):
        event.prevent_default()
        return True
    return False


class TextField(TextArea):
    """A text field with several lines."""

    async def _on_key(self, event: Key) -> None:
        if _is_joiner(event):
            self.insert(event.character or "")
        elif not event.is_printable or _has_alt(event):
            await run_binding(self, event)

    async def _on_paste(self, event: Paste) -> None:
        event.prevent_default()
        event.stop()
        await super()._on_paste(Paste(sanitize_paste(event.text)))


class LineField(Input):
    """A text field with one line. Pasted line breaks become spaces."""

    async def _on_key(self, event: Key) -> None:
        if _is_joiner(event):
            self.insert_text_at_cursor(event.character or "")
        elif not event.is_printable or _has_alt(event):
            await run_binding(self, event)

    def _on_paste(self, event: Paste) -> None:
        event.prevent_default()
        event.stop()
        super()._on_paste(Paste(sanitize_paste(event.text).strip("\n").replace("\n", " ")))


class WordButtons(Label):
    """A line with clickable words, which `word` creates."""

    def __init__(self, content: Content | str = "", *, id: str | None = None, classes: str | None = None) -> None:  # noqa: A002
        super().__init__(content, id=id, classes=classes, markup=False)

    async def action_ask(self, action: str) -> None:
        await self.app.run_action(action, self.parent)


class SplitLine(WordButtons):
    """A line with a left part and a right-aligned part."""

    DEFAULT_CSS = "SplitLine { width: 1fr; height: 1; text-wrap: nowrap; text-overflow: ellipsis; }"

    def __init__(self, left: Content, *rights: Content, classes: str | None = None) -> None:
        """Create the line. `rights`: versions of the right part, from long to short; the first that fits is shown."""
        super().__init__(classes=classes)
        self._left, self._rights = left, rights

    def show(self, left: Content, *rights: Content) -> None:
        """Replace both parts."""
        self._left, self._rights = left, rights
        self.refresh()

    def render(self) -> Content:
        spare = self.content_size.width - self._left.cell_length
        right = next((one for one in self._rights if one.cell_length + 2 <= spare), Content(""))
        return Content.assemble(self._left, " " * max(0, spare - right.cell_length), right)


def word(text: str, action: str) -> Content:
    """Return an underlined word that runs an action when clicked, as `clickable` does."""
    return clickable(Content.styled(text, Style(underline=True)), action)


def clickable(content: Content, action: str) -> Content:
    """Return content that runs an action when clicked. The parent of the line's widget handles the action."""
    return content.stylize(Style.from_meta({"@click": f"ask({action!r})"}))
