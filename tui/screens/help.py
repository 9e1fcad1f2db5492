"""The help page: all keys and commands."""

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Label

from tui.completion import command_suggestions
from tui.footer_keys import key_names
from tui.screens.dialog import Page
from tui.widgets.list_items import Item, Items
from tui.widgets.textual_internals import KeyFooter

KEYS = (
    ("enter", "Send (queued while a reply is running; ↑ takes it back)"),
    ("alt+enter, ctrl+j, \\ enter", "New line"),
    ("escape", "Stop the reply, close a dialog, or return to the prompt"),
    ("escape escape", "Edit your last message (empty prompt)"),
    ("ctrl+c", "Copy the selection, else stop the reply, clear the prompt, or quit (twice)"),
    ("ctrl+d", "Quit (empty prompt)"),
    ("ctrl+a/e/b/f/p/n/k/u/w", "Move and delete in the prompt, as in a shell"),
    ("up, down", "Previous / next message you sent"),
    ("ctrl+l", "Clear the prompt (^z or ↑ restores the text)"),
    ("backspace", "Remove the last attachment (empty prompt; ^z puts it back)"),
    ("pageup, pagedown", "Scroll the chat"),
    ("ctrl+home, ctrl+end", "Go to the start or the end of the chat"),
    ("/", "Menu of commands and their arguments"),
    ("@", "Menu of files to attach"),
    ("ctrl+r", "Search earlier inputs"),
    ("tab", "Complete from the menu, or indent (empty prompt: go to the chat list or the messages)"),
    ("shift+tab", "Select messages with up and down (letters still go to the prompt)"),
    ("ctrl+up, ctrl+y, ctrl+c", "On a message: edit, regenerate, copy"),
    ("left, right", "On a message: previous / next branch"),
    ("enter", "On a message: copy, save, or open its code and links"),
    ("ctrl+o", "Show or hide details of the selected or last message (thinking, tool calls, cost)"),
    ("ctrl+w", "On a message: wrap long lines of code"),
    ("f8, f9", "On a tool call that asks: allow once; go to the other answers"),
    ("ctrl+e, ctrl+k, ctrl+a", "In the chat list: rename, pin, archive"),
    ("delete, ctrl+d", "In the chat list: delete (asks first)"),
    ("ctrl+v, left, right", "In the chat list: show or hide the archive"),
    ("ctrl+\\", "Command palette"),
)


class HelpScreen(Page[None]):
    """The help page. Escape, F1, or q closes it."""

    CSS_PATH = "help.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,f1,q", "dismiss(None)", "Close")]

    def compose(self) -> ComposeResult:
        keys = [(key_names(names), words) for names, words in KEYS]
        commands = [(one.label, f"{one.help} · {one.keys}" if one.keys else one.help) for one in command_suggestions()]
        with VerticalScroll(can_focus=True):
            yield Label("Keys", classes="heading")
            yield _table(keys)
            yield Label("Commands", classes="heading")
            yield _table(commands)
            yield Label("Files: type @, paste a path, drop a file, or /attach PATH.", markup=False)
        yield KeyFooter()


def _table(rows: list[tuple[str, str]]) -> Items:
    width = max(len(left) for left, _ in rows) + 2
    return Items([Item(left.ljust(width), [Content(right)]) for left, right in rows])
