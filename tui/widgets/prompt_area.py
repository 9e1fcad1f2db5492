"""The text field of the prompt. Enter sends the text. Pasted text is sanitized."""

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import ClassVar

from textual import events
from textual.actions import SkipAction
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.strip import Strip
from textual.timer import Timer

from tui import commands
from tui.drafts import dropped_path
from tui.footer_keys import key_name
from tui.input_history import InputHistory
from tui.plain_text import sanitize, sanitize_paste
from tui.widgets.prompt_menu import PromptMenu
from tui.widgets.text_fields import TextField
from tui.widgets.textual_internals import ActiveCursor

# A paste with at least this many lines or characters becomes an attachment.
LONG_PASTE = 40  # lines
LARGE_PASTE = 10_000  # characters

# placeholders from long to short; the first that fits is shown
_PLACEHOLDERS = ("Ask anything   (/ commands   @ files)", "Ask anything")
_PRIVATE_PLACEHOLDERS = (*(f"Private: nothing is saved. {text}" for text in _PLACEHOLDERS), "Nothing is saved.")
_EDIT_PLACEHOLDERS = (f"The new text of this message ({key_name('escape')} cancels)", "The new text")


class PromptArea(TextField, ActiveCursor):
    """A text area that grows with its text and recalls earlier inputs."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "enter", "Send", show=False),
        Binding("ctrl+j,shift+enter,alt+enter", "break_line", "New line", show=False),
        Binding("up,ctrl+p", "up", "Earlier", show=False),
        Binding("down", "down", "Later", show=False),
        Binding("escape", "close_menu", "Close", show=False),
        Binding("ctrl+r", "search_inputs", "Search", show=False),
        Binding("ctrl+n", "readline('down')", "Later", show=False),
        Binding("ctrl+b", "readline('cursor_left')", "Left", show=False),
        Binding("ctrl+f", "readline('cursor_right')", "Right", show=False),
        Binding("ctrl+d", "delete_right_or_quit", "Delete", show=False),
        Binding("pageup", "page(-1)", "Page up", show=False),
        Binding("pagedown", "page(1)", "Page down", show=False),
        Binding("tab", "complete", "Complete", show=False),
        Binding("ctrl+l", "clear", "Clear", show=False),
    ]

    class Entered(Message):
        """The user pressed Enter. The field is already empty."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    class LongPasted(Message):
        """The user pasted a text that is too long to show here."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    class PathPasted(Message):
        """The user dropped a file on the terminal, pasted its path, or chose it in the menu.

        `typed`: its name in the prompt, or "".
        """

        def __init__(self, path: Path, typed: str = "") -> None:
            super().__init__()
            self.path = path
            self.typed = typed

    class DetachAsked(Message):
        """The user pressed Backspace in an empty prompt, which removes the last attachment."""

    class UndoAsked(Message):
        """The user asked to undo in an empty prompt: put back the attachments that were removed last, else the text."""

    class PageAsked(Message):
        """The user pressed a page key, and the prompt has no hidden lines: scroll the chat."""

        def __init__(self, step: int) -> None:
            super().__init__()
            self.step = step

    def __init__(
        self, menu: PromptMenu, take_back: Callable[[], bool], stored: Callable[[], Awaitable[Sequence[str]]]
    ) -> None:
        """Create the field with its menu.

        `take_back` moves the last queued message into the empty prompt, and returns whether there was one. `stored`
        returns the last inputs of all windows, newest first.
        """
        super().__init__(compact=True, highlight_cursor_line=False, placeholder=_PLACEHOLDERS[0])
        self._placeholders: Sequence[str] = _PLACEHOLDERS
        self._menu = menu
        self._take_back = take_back
        self._stored = stored
        self.cursor_blink = False  # each blink would redraw the prompt and everything beside it
        self._history = InputHistory()
        self._hint_end: Timer | None = None
        self.edited_reply = ""  # the reply that is being edited: the up key recalls only texts of the user

    def remember(self, inputs: Sequence[str]) -> None:
        """Add inputs of earlier runs. `inputs`: newest first."""
        self._history.remember(inputs)

    def change_chat(self, *, is_private: bool) -> None:
        """Prepare the prompt for another chat. The inputs of a private chat are forgotten."""
        self._menu.close()
        self._history.change_chat(is_private=is_private)
        self.border_title = "Private" if is_private else ""
        self.show_purpose(edits=False)

    def show_purpose(self, *, edits: bool) -> None:
        """Say in the empty prompt what it is for: another message, or the text of an earlier one."""
        another = _PRIVATE_PLACEHOLDERS if self._history.is_private else _PLACEHOLDERS
        self._placeholders = _EDIT_PLACEHOLDERS if edits else another
        self._fit_placeholder()

    def on_resize(self) -> None:
        self._fit_placeholder()

    def _fit_placeholder(self) -> None:
        fitting = (text for text in self._placeholders if len(text) <= self.content_size.width)
        self.placeholder = next(fitting, self._placeholders[-1])

    @property
    def draft(self) -> str:
        """Text that was typed and not sent. An earlier input that was recalled and not changed does not count."""
        return self._history.draft(self.text)

    @property
    def is_recalled(self) -> bool:
        """Whether the text is an earlier input that was recalled and not changed."""
        return self._history.shows(self.text)

    def write(self, text: str) -> None:
        """Replace the text, and move the cursor to its end."""
        self._history.set_aside()
        self._show(sanitize(text))

    def replace_end(self, old: str, new: str) -> None:
        """Replace `old` at the end. A command that failed may have returned to the prompt before it."""
        if new != old:
            self.put_away()
            self.write(self.text.removesuffix(old) + new)

    def withdraw(self, name: str) -> None:
        """Remove the name of a file that could not be attached, unless the user has changed it."""
        if (at := self.text.rfind(name)) >= 0:
            ends = at + len(name) + self.text.startswith(" ", at + len(name))
            self.delete(_location(self.text[:at]), _location(self.text[:ends]))

    def put_away(self) -> None:
        """Add the current text to the inputs before it is replaced, so that the up key recalls it."""
        if self.text != self.edited_reply:
            self._history.put_away(self.text)

    def render_line(self, y: int) -> Strip:
        """Return an empty line at width 0, where Textual cannot wrap the placeholder."""
        return super().render_line(y) if self.content_size.width else Strip.blank(0)

    def hint(self, text: str, seconds: float) -> None:
        """Show a hint in the border for `seconds`."""
        self.border_subtitle = text
        if self._hint_end is not None:
            self._hint_end.stop()
        self._hint_end = self.set_timer(seconds, self.end_hint)

    def end_hint(self) -> None:
        """Replace the hint in the border by the keys of the menu, if it is open."""
        self.border_subtitle = self._menu.keys

    def action_enter(self) -> None:
        """Send the text. After a backslash, replace the backslash with a line break, as shells do."""
        row, column = self.cursor_location
        if self.document.get_line(row)[:column].endswith("\\"):
            super().action_delete_left()
            self.action_break_line()
        elif not self.take_choice(runs=True):
            self._submit(self.text.strip())

    def _submit(self, text: str) -> None:
        self._menu.close()
        self._history.set_aside()
        if not self.edited_reply:
            self._history.append(text)
        self.write("")
        self.post_message(self.Entered(text))

    async def _on_paste(self, event: events.Paste) -> None:
        event.prevent_default()
        event.stop()
        text = sanitize_paste(event.text)
        if (path := dropped_path(event.text)) is not None:
            self.post_message(self.PathPasted(path))
        elif text.count("\n") >= LONG_PASTE or len(text) >= LARGE_PASTE:
            self.post_message(self.LongPasted(text))
        else:
            await super()._on_paste(event)

    def action_clear(self) -> None:
        """Clear the prompt. Undo and the up key restore the text."""
        self.put_away()
        self._history.set_aside()
        self.clear()

    def action_cut(self) -> None:
        """Cut the selection. Do nothing without one."""
        if self.selected_text:
            super().action_cut()
            self.app.notify(f"Cut. {key_name('ctrl+v')} pastes it, {key_name('ctrl+z')} undoes it.", markup=False)

    def action_undo(self) -> None:
        if self.text:
            super().action_undo()
        else:
            self.post_message(self.UndoAsked())

    def action_break_line(self) -> None:
        self.insert("\n")

    def action_delete_left(self) -> None:
        if self.text:
            super().action_delete_left()
        else:
            self.post_message(self.DetachAsked())

    async def action_readline(self, action: str) -> None:
        """Run an action of the prompt. If the prompt is empty, leave the key to the screen."""
        if not self.text:
            raise SkipAction
        await self.run_action(action)

    async def action_delete_right_or_quit(self) -> None:
        if self.text:
            self.action_delete_right()
        else:
            await self.app.action_quit()

    @property
    def cursor_index(self) -> int:
        """Position of the cursor as an index into the text."""
        row, column = self.cursor_location
        return sum(len(self.document.get_line(line)) + 1 for line in range(row)) + column

    def take_choice(self, *, runs: bool) -> bool:
        """Insert the highlighted row of the menu, and return whether there was one. With `runs`, run it if it is a
        command.
        """
        choice = self._menu.choose(self.text, first=not runs)
        if choice is None:
            return False
        if choice.can_run and runs:
            self._submit(choice.text)
            return True
        self.write(choice.text)
        self.move_cursor(_location(choice.text[: choice.cursor]))
        if choice.attach is not None:
            self.post_message(self.PathPasted(choice.attach, choice.name))
        return True

    def action_close_menu(self) -> None:
        """Close the menu. If it is closed, leave the key to the screen."""
        if not self._menu.dismiss():
            raise SkipAction

    async def action_search_inputs(self) -> None:
        """Search earlier inputs for the typed text, also those of other windows. During a search, go to the next
        match.
        """
        own = [*dict.fromkeys(reversed(self._history.entries))]
        other = [text for text in map(sanitize, await self._stored()) if text not in own]
        self._menu.search([*other, *own], self.text)

    def action_complete(self) -> None:
        """Complete from the menu, or indent the line. Tab leaves the prompt only if it is empty, so that no text stays
        half typed.
        """
        if not self.text:
            self.screen.focus_next()
        elif self.take_choice(runs=False):
            pass
        elif commands.parse_command(self.text) is None:
            row, column = self.cursor_location
            if not self.document.get_line(row)[:column].strip():
                self.insert(" " * (self.indent_width - column % self.indent_width))

    def action_up(self) -> None:
        if self._menu.is_open:
            self._menu.move(-1)
        elif not self.text and self._take_back():
            pass
        elif not (self.cursor_at_first_line and self._recall(-1)):
            self.action_cursor_up()

    def action_down(self) -> None:
        if self._menu.is_open:
            self._menu.move(1)
        elif not (self.cursor_at_last_line and self._recall(1)):
            self.action_cursor_down()

    def action_page(self, step: int) -> None:
        if not self.max_scroll_y:
            self.post_message(self.PageAsked(step))
        elif step < 0:
            self.action_cursor_page_up()
        else:
            self.action_cursor_page_down()

    def _recall(self, step: int) -> bool:
        """Show an earlier or later input. Returns whether there is one."""
        if (recalled := self._history.recall(step, self.text)) is not None:
            self._show(recalled)
        return recalled is not None

    def _show(self, text: str) -> None:
        self.load_text(text)
        self.move_cursor(self.document.end)


def _location(before: str) -> tuple[int, int]:
    """Return the row and the column of the position after this text."""
    *above, last = before.split("\n")
    return len(above), len(last)
