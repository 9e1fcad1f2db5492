"""A screen that lies over the chat until it is answered or closed. Refuses to know what it is about."""

from typing import TypeVar

from textual.await_complete import AwaitComplete
from textual.screen import Screen

Answer = TypeVar("Answer")


class OverChat(Screen[Answer]):
    """What all of them share."""

    def dismiss(self, result: Answer | None = None) -> AwaitComplete:
        """Once: an answer that was typed or clicked twice would close what lies below, too. And not before the screen
        is composed, which would then look for parts that are not there."""
        if not self.is_mounted:
            self.call_later(self._dismiss_now, result)
            return AwaitComplete()
        return super().dismiss(result) if self.is_active else AwaitComplete()

    def _dismiss_now(self, result: Answer | None) -> None:
        self.dismiss(result)  # not returned: a screen cannot await in its own turn that it is closed


class Page(OverChat[Answer]):
    """One that only shows something: another one takes its place."""
