"""The menu above the prompt: commands, their arguments, files, and earlier inputs. The prompt forwards its keys."""

from collections.abc import Sequence

from textual import work
from textual.message import Message
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from tui.completion import Choice, Completions, Request, Suggestion, choose, command_suggestions, find_request, match
from tui.plain_text import single_line
from tui.widgets.rows import lines_of

_NO_INPUT = Suggestion("", "No earlier input matches.", is_note=True)
_KEYS = "↑↓ choose · tab complete · esc close"


class PromptMenu(OptionList, can_focus=False):
    """Shown while the text at the cursor can be completed, or while the user searches earlier inputs."""

    class Toggled(Message):
        """The menu was opened or closed, or has another number of rows."""

    def __init__(self, completions: Completions) -> None:
        super().__init__(markup=False)
        self._completions = completions
        self._request: Request | None = None  # the request whose suggestions are shown; None: the menu is closed
        self._text = ""  # text of the prompt to which the suggestions belong
        self._shown: Sequence[Suggestion] = ()
        self._inputs: Sequence[Suggestion] | None = None  # set during a search of earlier inputs
        self._is_dismissed = False  # whether Escape closed the menu; reset when the text has nothing to complete

    @property
    def is_open(self) -> bool:
        return self._request is not None and bool(self._shown)

    @property
    def keys(self) -> str:
        """The keys of the open menu, and the number of its rows; "" if it is closed."""
        if not self.is_open:
            return ""
        return f"{_KEYS} · {len(self._shown)} rows" if len(self._shown) > 1 else _KEYS

    def follow(self, text: str, cursor: int) -> None:
        """Update the suggestions after the prompt has changed."""
        if self._inputs is not None:
            found = [one for one in self._inputs if text.lower() in one.name.lower()]
            self._show(Request("history", text), text, found or [_NO_INPUT])
            return
        request = find_request(text, cursor)
        self._is_dismissed = self._is_dismissed and request is not None
        if request is None or self._is_dismissed:
            self.close()
        else:
            self._find(request, text)

    @work(exclusive=True, group="suggest", description="suggest")
    async def _find(self, request: Request, text: str) -> None:
        self._show(request, text, await self._completions.suggest(request))

    def search(self, inputs: Sequence[str], text: str) -> None:
        """Start a search in earlier inputs, newest first. During a search, highlight the next match."""
        if self._inputs is not None:
            self.move(1)
            return
        self._inputs = [Suggestion(one, single_line(one)) for one in inputs]
        self.follow(text, len(text))

    def move(self, step: int) -> None:
        """Highlight the next or previous row."""
        if step > 0:
            self.action_cursor_down()
        else:
            self.action_cursor_up()

    def choose(self, text: str, *, first: bool) -> Choice | None:
        """Close the menu and return the prompt with the highlighted row. None if no row is highlighted for this text.

        `first`: if no row is highlighted, use the first one.
        """
        if text != self._text and self._inputs is None and not self._is_dismissed:
            self._show_commands(text)
        row = 0 if first and self.highlighted is None else self.highlighted
        if self._request is None or not self.is_open or text != self._text or row is None or self._shown[row].is_note:
            return None
        choice = choose(self._request, self._shown[row])
        self.close()
        return choice

    def _show_commands(self, text: str) -> None:
        """Show the commands that match `text`, if the suggestions are still those of an earlier text."""
        request = find_request(text, len(text))
        if request is not None and request.source == "commands":
            self._show(request, text, match(request.query, command_suggestions()))

    def dismiss(self) -> bool:
        """Close the menu until the text has nothing to complete. Returns whether the menu was in use."""
        was_used = self.is_open or self._inputs is not None
        self._is_dismissed = was_used and self._inputs is None
        self.close()
        return was_used

    def close(self) -> None:
        self.workers.cancel_group(self, "suggest")
        self._inputs = None
        self._completions.forget()
        self._show(None, "", ())

    def _show(self, request: Request | None, text: str, found: Sequence[Suggestion]) -> None:
        keys = self.keys
        is_changed = found != self._shown
        self._request, self._text, self._shown = request, text, found
        if is_changed:
            lines = zip(lines_of(found), found, strict=True)
            self.set_options(Option(line, disabled=one.is_note) for line, one in lines)
            can_take = bool(found) and not found[0].is_note and request is not None and request.takes_first
            self.highlighted = 0 if can_take else None
        self.display = self.is_open
        if keys != self.keys:
            self.post_message(self.Toggled())
