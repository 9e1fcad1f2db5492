"""The state of a reply that is being generated, built from its stream of events."""

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
    """One reply, from the moment it was requested."""

    chat: ChatId
    to: MessageId
    clock: Callable[[], float] = time.monotonic
    activity: str = "waiting"  # in words, for the status line
    message: Message | None = None  # None until the reply has started
    stopping: bool = False  # the user has stopped it
    _asked: float = field(init=False)
    _text: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)
    _thinking_since: float = 0.0
    _reasoning_seconds: float = 0.0  # set once the reasoning has ended

    def __post_init__(self) -> None:
        self._asked = self.clock()

    @property
    def seconds(self) -> float:
        """How long ago the reply was requested."""
        return self.clock() - self._asked

    @property
    def reasoning_seconds(self) -> float:
        """How long the model has been reasoning, or did."""
        if self._reasoning_seconds or not self._reasoning:
            return self._reasoning_seconds
        return self.clock() - self._thinking_since

    def apply(self, event: ReplyEvent) -> None:
        """Update the state with the next event."""
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
        """End the reply."""
        self.activity = ""
        self.message = self.snapshot(finish, usage)
        if self.message is not None and error:
            self.message = replace(self.message, error=error)

    def snapshot(self, finish: Finish | None = None, usage: Usage | None = None) -> Message | None:
        """Return the message with all text received until now; None if the reply has not started."""
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
