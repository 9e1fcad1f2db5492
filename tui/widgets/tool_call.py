"""A tool call in a reply: one folded line with arguments and result, and the question whether the call may run."""

import json
from time import monotonic
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.widgets import Label, OptionList
from textual.widgets.option_list import Option

from tui import figures
from tui.footer_keys import key_name
from tui.plain_text import head, single_line, start
from tui.types import CallId, Permission, ToolCalled, ToolStep
from tui.widgets.folded import Folded
from tui.widgets.rows import Rows

# maximum number of characters of all arguments, and of one value, on the folded line
_LONGEST_ARGUMENTS, _LONGEST_VALUE = 60, 40
_LONGEST_RESULT = 20_000  # maximum number of characters of a result that are shown
# seconds after the question appears in which keys are ignored, because they were meant for something else
_GUARD_SECONDS = 0.4

# Terminals and desktops use F10 (menu), F11 (full screen), and F12 (drop-down terminals, web developer tools).
ALLOW_KEY, CHOOSE_KEY = "f8", "f9"
ALLOW, CHOOSE = key_name(ALLOW_KEY), key_name(CHOOSE_KEY)
# the keys of a question with and without the focus
FOCUSED_KEYS = f"↑↓ choose · ⏎ answer · {ALLOW} allow once"
KEYS = f"{ALLOW} allow once · {CHOOSE} other answers"

_ANSWERS = (
    (Permission.ONCE, "Allow once"),
    (Permission.CHAT, "Allow in this chat"),
    (Permission.ALWAYS, "Always allow"),
    (Permission.DENY, "Deny"),
)


class ToolCallLine(Folded):
    """Shows one tool call. `call` is None for a stored call. `asks`: whether it waits for the user's permission."""

    def __init__(self, name: str, arguments: str, call: CallId | None = None, *, asks: bool = False) -> None:
        super().__init__("", "")
        self.call = call
        self._tool, self._arguments = single_line(name), arguments
        self._mark, self._note = ("…", "$text-muted"), "asks for permission" if asks else "running"
        self._result = ""
        self._describe()

    @classmethod
    def of_step(cls, step: ToolStep) -> "ToolCallLine":
        """Return the line of a tool call that has ended."""
        line = cls(step.name, step.arguments)
        line.finish(step.result, is_error=step.is_error)
        return line

    def run(self) -> None:
        """Show that the user has allowed the call."""
        self._note = "running"
        self._describe()

    def finish(self, result: str, *, is_error: bool) -> None:
        """Mark the call as ended, and show its result."""
        self.call, self._result = None, result
        self._mark = ("✗", "$text-error") if is_error else ("✓", "$text-success")
        self._note = start(result, _LONGEST_VALUE) if is_error else figures.size(len(result.encode()))
        self._describe()

    def stop(self) -> None:
        """Mark the call as stopped before it ended."""
        self.call, self._mark, self._note = None, ("–", "$text-muted"), "stopped"
        self._describe()

    def _describe(self) -> None:
        arguments = short_arguments(self._arguments)
        self._line = Content.assemble(
            self._mark, " ", (self._tool, "bold"), f" ({arguments})" if arguments else "", f" · {self._note}"
        )
        result = head(self._result, _LONGEST_RESULT) if self._result else self._note
        self._text = f"Arguments\n{pretty_json(self._arguments)}\n\nResult\n{result}"
        self._show()


def short_arguments(arguments: str) -> str:
    """Return the arguments as one line: "path: README.md, lines: 20"."""
    try:
        values = json.loads(arguments or "{}")
        if isinstance(values, dict):
            arguments = ", ".join(f"{name}: {start(_as_text(value), _LONGEST_VALUE)}" for name, value in values.items())
    except (ValueError, RecursionError):  # RecursionError: the arguments are nested too deeply
        pass
    return start(arguments, _LONGEST_ARGUMENTS)


def pretty_json(text: str) -> str:
    """Return JSON with one value on each line. Other text, and too deeply nested JSON, is returned unchanged."""
    try:
        return json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return text


def members(text: str) -> str:
    """Return a JSON object without its braces, with one value on each line. Other text is returned as `pretty_json`."""
    pretty = pretty_json(text)
    is_object = pretty.startswith("{\n") and pretty.endswith("\n}")
    return "\n".join(line.removeprefix("  ") for line in pretty.splitlines()[1:-1]) if is_object else pretty


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class PermissionAsk(Vertical):
    """The question whether a tool call may run. The user clicks an answer, or presses its key, also in the prompt.

    Long arguments scroll, so that the name of the tool and all answers are visible in a low terminal.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("pageup", "page(-1)", "Arguments up", show=False, priority=True),
        Binding("pagedown", "page(1)", "Arguments down", show=False, priority=True),
    ]

    class Answered(Message):
        def __init__(self, call: CallId, permission: Permission) -> None:
            super().__init__()
            self.call = call
            self.permission = permission

    DEFAULT_CSS: ClassVar[str] = """
    PermissionAsk { height: auto; border: round $warning; padding: 0 1; margin: 0 0 1 0; }
    PermissionAsk VerticalScroll { height: auto; scrollbar-size-vertical: 1; }
    PermissionAsk Label { width: 1fr; }
    PermissionAsk OptionList { height: auto; background: transparent; padding: 0; }
    """

    def __init__(self, called: ToolCalled) -> None:
        super().__init__()
        self.called = called
        self._asked_at = monotonic()

    def compose(self) -> ComposeResult:
        with VerticalScroll(can_focus=False):
            yield Label(head(members(self.called.arguments), _LONGEST_RESULT), markup=False)
        yield Rows(*(Option(words, id=kind.value) for kind, words in _ANSWERS))

    def on_mount(self) -> None:
        self.border_title = Content(f"Run {single_line(self.called.name)}?")
        self._show_keys()
        self.query_one(OptionList).highlighted = 0

    def on_resize(self) -> None:
        """Limit the lines of the arguments, so that the whole question is visible above the prompt."""
        self.query_one(VerticalScroll).styles.max_height = max(1, self.app.size.height // 3 - len(_ANSWERS))
        self.call_after_refresh(self._show_keys)

    def on_descendant_focus(self) -> None:
        self._show_keys()

    def on_descendant_blur(self) -> None:
        self._show_keys()

    def _show_keys(self) -> None:
        """Show the keys of the moment, the one for hidden arguments first."""
        is_cut = self.query_one(VerticalScroll).max_scroll_y > 0
        keys, more = (FOCUSED_KEYS, "pgdn more · ") if self.has_focus_within else (KEYS, f"{CHOOSE} more · ")
        self.border_subtitle = f"{more}{keys}" if is_cut else keys

    def action_page(self, step: int) -> None:
        """Scroll the arguments by a page."""
        shown = self.query_one(VerticalScroll)
        shown.scroll_relative(y=step * shown.size.height, animate=False)

    @on(OptionList.OptionSelected)
    def answer(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        if monotonic() - self._asked_at >= _GUARD_SECONDS:
            self.post_message(self.Answered(self.called.call, Permission(event.option.id)))
