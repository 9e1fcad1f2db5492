"""Where people type: a line, or several. Keys take effect in their order, and what is pasted is made harmless."""

from textual.events import Key, Paste
from textual.widget import Widget
from textual.widgets import Input, TextArea

from tui.plain_text import pasted


async def run_binding(field: Widget, event: Key) -> None:
    """Do at once what a key is bound to in `field` itself.

    Textual sends such a key round by the app before it does anything, and what is typed behind it overtakes it.
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
        await super()._on_paste(Paste(pasted(event.text)))


class LineField(Input):
    """One line; line breaks that are pasted into it are spaces."""

    async def _on_key(self, event: Key) -> None:
        if not event.is_printable:
            await run_binding(self, event)

    def _on_paste(self, event: Paste) -> None:
        event.prevent_default()
        event.stop()
        super()._on_paste(Paste(pasted(event.text).strip("\n").replace("\n", " ")))
