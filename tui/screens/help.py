"""The help page: all keys and commands."""

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Footer, Label

from tui.commands import COMMANDS
from tui.screens.dialog import Page

KEYS = (
    ("enter", "Send; while a reply comes, send it after that one"),
    ("ctrl+j, shift+enter", "Break the line"),
    ("escape", "Stop the reply; leave a dialog; go back to the prompt"),
    ("up, down", "Earlier and later inputs, at the edges of the text"),
    ("ctrl+l", "Clear the prompt; ctrl+z brings the text back, and so does up"),
    ("backspace", "Where nothing is typed: take away the file that was attached last"),
    ("pageup, pagedown", "Scroll the chat"),
    ("tab", "Complete a command, or indent; with an empty prompt, go to the chat list"),
    ("shift+tab", "Go to the messages; up and down select another one. Letters always go to the prompt"),
    ("ctrl+up, ctrl+r, ctrl+c", "On a message: edit, regenerate, copy"),
    ("left, right", "On a message: the other branches; nothing is read again"),
    ("enter", "On a message: its code and links, to copy, save or open"),
    ("ctrl+o", "On a message: open or close the thoughts"),
    ("ctrl+e, ctrl+k, ctrl+a", "In the chat list: rename, pin, archive"),
    ("delete, ctrl+d", "In the chat list: delete, after a question"),
    ("ctrl+v, left, right", "In the chat list: show the archive, and back"),
    ("ctrl+p", "The palette: commands by name"),
    ("ctrl+c", "Copy what is selected"),
)


class HelpScreen(Page[None]):
    """A page that Escape, F1, or q closes."""

    CSS_PATH = "help.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,f1,q", "dismiss(None)", "Close")]

    def compose(self) -> ComposeResult:
        keys = [*KEYS, *((command.key, command.help) for command in COMMANDS if command.key)]
        commands = [(f"/{command.name} {command.takes}", command.help) for command in COMMANDS]
        with VerticalScroll(can_focus=True):
            yield Label("Keys", classes="heading")
            yield Label(_table(keys))
            yield Label("Commands, typed into the prompt", classes="heading")
            yield Label(_table(commands))
            yield Label("Files: paste a path, drop a file, or /attach PATH.", markup=False)
        yield Footer()


def _table(rows: list[tuple[str, str]]) -> Content:
    width = max(len(left) for left, _ in rows) + 2
    lines = [Content.assemble((left.ljust(width), "bold $text-primary"), right) for left, right in rows]
    return Content("\n").join(lines)
