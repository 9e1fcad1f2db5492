"""A reply that is being written: what is known of it so far. Folds the events of a stream; knows no widget."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tui import figures
from tui.types import (
    ChatId,
    Finish,
    Message,
    MessageId,
    PromptProgress,
    ReasoningDelta,
    ReplyEnd,
    ReplyEvent,
    ReplyStarted,
    Role,
    TextDelta,
    Usage,
)


@dataclass(slots=True)
class ReplyProgress:
    """One reply, from the moment in which it was asked for."""

    chat: ChatId
    to: MessageId
    clock: Callable[[], float] = time.monotonic
    activity: str = "waiting"  # in words, for a line
    message: Message | None = None  # once it has started
    stopping: bool = False  # somebody does not want the rest
    _text: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)
    _thinking_since: float = 0.0
    _reasoning_seconds: float = 0.0  # once it does not think any more

    @property
    def reasoning_seconds(self) -> float:
        """How long it has been thinking; or did, once it answers."""
        if self._reasoning_seconds or not self._reasoning:
            return self._reasoning_seconds
        return self.clock() - self._thinking_since

    def apply(self, event: ReplyEvent) -> None:
        """The next event of its stream."""
        match event:
            case ReplyStarted(message, model):
                self.message = Message(message, self.to, Role.ASSISTANT, "", time.time(), model=model)
            case PromptProgress():
                self.activity = figures.prompt_progress(event)
            case ReasoningDelta(text):
                if not self._reasoning:
                    self._thinking_since = self.clock()
                self._reasoning.append(text)
                self.activity = "thinking"
            case TextDelta(text):
                self._end_thinking()
                self._text.append(text)
                self.activity = "writing"
            case ReplyEnd(finish, usage, error):
                self._end_thinking()
                self.finish(finish, usage, error)

    def finish(self, finish: Finish, usage: Usage | None = None, error: str = "") -> None:
        """Nothing more comes."""
        self.activity = ""
        self.message = self.snapshot(finish, usage)
        if self.message is not None and error:
            self.message = replace(self.message, error=error)

    def snapshot(self, finish: Finish | None = None, usage: Usage | None = None) -> Message | None:
        """The message with all text that has come."""
        return self.message and replace(
            self.message,
            text="".join(self._text),
            reasoning="".join(self._reasoning),
            reasoning_seconds=self.reasoning_seconds,
            finish=finish,
            usage=usage,
        )

    def _end_thinking(self) -> None:
        self._reasoning_seconds = self.reasoning_seconds
