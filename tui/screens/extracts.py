"""Lists the code blocks and links of one message, for use without a mouse. Returns the choice and its action."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Label, OptionList
from textual.widgets.option_list import Option

from tui.extracts import Address, Code, Extract
from tui.footer_keys import key_name
from tui.plain_text import single_line, start
from tui.screens.dialog import Dialog
from tui.widgets.rows import Rows

_LONGEST_LINE = 100  # maximum number of characters shown of a line


@dataclass(frozen=True, slots=True)
class ExtractChoice:
    """The extract that the user chose, and what to do with it."""

    extract: Extract
    to_file: bool = False


class ExtractsScreen(Dialog[ExtractChoice]):
    """Lists code blocks and links. Enter copies code or opens a link."""

    CSS_PATH = "extracts.tcss"
    AUTO_FOCUS = "OptionList"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+c", "copy", "Copy"),
        Binding("ctrl+s", "save", "Save code"),
    ]

    def __init__(self, extracts: Sequence[Extract]) -> None:
        super().__init__()
        self._extracts = extracts

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as dialog:
            dialog.border_subtitle = f"↑↓ choose · ⏎ copy or open · {key_name('ctrl+s')} save · esc close"
            yield Label("Code and links of this message", classes="question")
            yield Rows(*(Option(_line(extract)) for extract in self._extracts))

    def on_mount(self) -> None:
        self.query_one(OptionList).highlighted = 0

    def _chosen(self) -> Extract:
        return self._extracts[self.query_one(OptionList).highlighted or 0]

    @on(OptionList.OptionSelected)
    def choose(self) -> None:
        self.dismiss(ExtractChoice(self._chosen()))

    def action_copy(self) -> None:
        self.dismiss(ExtractChoice(Code(self._chosen().text, "")))

    def action_save(self) -> None:
        if isinstance(self._chosen(), Code):
            self.dismiss(ExtractChoice(self._chosen(), to_file=True))


def _line(extract: Extract) -> Content:
    first = start(extract.text.strip().partition("\n")[0], _LONGEST_LINE)
    if isinstance(extract, Address):
        return Content.assemble(("link  ", "dim"), first)
    lines = extract.text.count("\n") + 1
    size = f"{lines} {'line' if lines == 1 else 'lines'}"
    return Content.assemble((f"{single_line(extract.language)[:24] or 'code'}, {size}  ", "dim"), first)
