"""Explains why a reply is missing or incomplete, and what the user can do."""

import re

from textual.content import Content

from tui import figures
from tui.plain_text import capitalized, head
from tui.types import Finish, Message, Role
from tui.widgets.text_fields import WordButtons, word

_SENTENCE = re.compile(r"(.{1,300}?[.!?])\s+(\S.*)", re.DOTALL)
_HARMLESS = (Finish.LENGTH, Finish.CONTEXT_FULL, Finish.STOPPED, Finish.ELSEWHERE)
# a retry would only repeat the end of a full context, or disturb the other window
_NOT_RETRIED = (Finish.CONTEXT_FULL, Finish.ELSEWHERE)
_LONGEST = 4000  # maximum number of characters of the details


class Outcome(WordButtons):
    """A block of a message with the reason, the remedy, and links to retry and to show details."""

    def __init__(self, message: Message) -> None:
        super().__init__(classes="outcome")
        self._message = message
        self._is_detailed = False
        self.show(message)

    def show(self, message: Message) -> None:
        self._message = message
        self.set_class(message.finish not in _HARMLESS, "-failed")
        self.update(self._content())

    def toggle_details(self) -> None:
        self._is_detailed = not self._is_detailed
        self.update(self._content())

    def _content(self) -> Content:
        reason, remedy, details = explain(self._message)
        mark = ("✗ ", "$text-error") if self.has_class("-failed") else ("! ", "$text-warning")
        lines = [Content.assemble(mark, reason)]
        if remedy:
            lines.append(Content(remedy))
        if details and self._is_detailed:
            lines.append(Content.styled(head(details, _LONGEST), "$text-muted"))
        words = []
        if self._message.finish not in _NOT_RETRIED:
            words += [word("retry", "regenerate"), Content.styled(" ^y   ", "$text-muted")]
        if details:
            words += [word("details", "details"), Content.styled(" ^o", "$text-muted")]
        return Content("\n").join([*lines, Content.assemble(*words)] if words else lines)


def has_outcome(message: Message) -> bool:
    """Whether a message needs an Outcome block."""
    return message.finish in figures.FINISHES or (message.role is Role.USER and bool(message.error))


def explain(message: Message) -> tuple[str, str, str]:
    """Return the reason in one sentence, the remedy, and technical details. Only the reason is never empty."""
    label = figures.FINISHES.get(message.finish, "") if message.finish else "No reply."
    if not message.error:
        return label, "", ""
    told, _, details = message.error.partition("\n")
    found = _SENTENCE.fullmatch(told.strip())
    reason, remedy = (found[1], found[2]) if found else (told.strip(), "")
    return capitalized(reason), remedy, details.strip()
