"""The state of a reply while it is generated, updated from its stream of events."""

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tui import figures
from tui.types import (
    CallId,
    ChatId,
    EngineRestarting,
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
    ToolCalled,
    ToolReturned,
    ToolStep,
    Usage,
)


class Stage(enum.Enum):
    """The current activity of a reply."""

    WAITING = "waiting"
    RESTARTING = "restarting"
    READING = "reading"
    THINKING = "thinking"
    WRITING = "writing"
    CALLING = "running a tool"
    ENDED = ""


@dataclass(slots=True)
class ReplyProgress:
    """One reply, from its request to its end."""

    chat: ChatId
    to: MessageId
    clock: Callable[[], float] = time.monotonic
    message: Message | None = None  # None until the reply has started
    stopping: bool = False  # whether the user has stopped it
    _asked: float = field(init=False)
    stage: Stage = Stage.WAITING
    stage_since: float = 0.0
    prompt: PromptProgress | None = None  # the last progress report of this turn
    tokens: int = 0  # number of tokens generated so far, also before tool calls
    calls: dict[CallId, ToolCalled] = field(default_factory=dict)  # calls that have no result yet
    _first_prompt: PromptProgress | None = None
    _timed_from: int = 0  # `tokens` after the first delta of this turn, whose own time is unknown
    _first_delta: float | None = None  # when the first delta of this turn arrived
    _steps: list[ToolStep] = field(default_factory=list)
    _text: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)
    _thinking_since: float = 0.0
    _reasoning_seconds: float = 0.0  # set when the reasoning has ended

    def __post_init__(self) -> None:
        self._asked = self.stage_since = self.clock()

    @property
    def seconds(self) -> float:
        """Seconds since the reply was requested."""
        return self.clock() - self._asked

    @property
    def activity(self) -> str:
        """Description of the current stage; empty after the end."""
        if self.asking is not None:
            return "waiting for your permission"
        return self.stage.value

    @property
    def stage_seconds(self) -> float:
        return self.clock() - self.stage_since

    @property
    def asking(self) -> ToolCalled | None:
        """The first call that waits for the user's permission."""
        return next((call for call in self.calls.values() if call.asks), None)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second since the first delta of this turn; 0 before the second one."""
        if self._first_delta is None:
            return 0.0
        return figures.rate(self.tokens - self._timed_from, self.clock() - self._first_delta)

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds until prefill ends; None if unknown."""
        first, last = self._first_prompt, self.prompt
        if first is None or last is None or last.done <= first.done:
            return None
        return self.stage_seconds * (last.total - last.done) / (last.done - first.done)

    @property
    def reasoning_seconds(self) -> float:
        """Seconds that the model has been reasoning so far, or took to reason."""
        if self._reasoning_seconds or not self._reasoning:
            return self._reasoning_seconds
        return self.clock() - self._thinking_since

    def apply(self, event: ReplyEvent) -> None:
        """Update the state with the next event."""
        match event:
            case ReplyStarted(message, model):
                self.message = Message(message, self.to, Role.ASSISTANT, "", time.time(), model=model)
            case EngineRestarting():
                self._enter(Stage.RESTARTING)
            case PromptProgress():
                self._enter(Stage.READING)
                self._first_prompt, self.prompt = self._first_prompt or event, event
            case ReasoningDelta(text, tokens):
                if not self._reasoning:
                    self._thinking_since = self.clock()
                self._reasoning.append(text)
                self._count(tokens, Stage.THINKING)
            case TextDelta(text, tokens):
                self._end_thinking()
                self._text.append(text)
                self._count(tokens, Stage.WRITING)
            case ToolCalled(call):
                self._end_thinking()
                self.calls[call] = event
                self._enter(Stage.CALLING)
            case ToolReturned():
                self._end_call(event)
            case ReplyEnd(finish, usage, error):
                self._end_thinking()
                self.finish(finish, usage, error)

    def note_answer(self, call: CallId) -> None:
        """Record that the user has answered the question about a call."""
        if (called := self.calls.get(call)) is not None:
            self.calls[call] = replace(called, asks=False)
            self.stage_since = self.clock()

    def _enter(self, stage: Stage) -> None:
        if stage is not self.stage:
            self.stage, self.stage_since = stage, self.clock()

    def _count(self, tokens: int, stage: Stage) -> None:
        self._enter(stage)
        self.tokens += tokens
        if self._first_delta is None:
            self._timed_from, self._first_delta = self.tokens, self.clock()

    def _end_call(self, event: ToolReturned) -> None:
        """Add a tool call as a step, with the text and the reasoning that the model wrote before it."""
        call = self.calls.pop(event.call, None)
        if call is None:
            return
        text, reasoning = "".join(self._text), "".join(self._reasoning)
        self._steps.append(ToolStep(call.name, call.arguments, event.result, event.is_error, text, reasoning))
        self._text, self._reasoning, self._reasoning_seconds = [], [], 0.0
        self._first_delta = self.prompt = self._first_prompt = None
        if not self.calls:
            self._enter(Stage.WAITING)

    def finish(self, finish: Finish, usage: Usage | None = None, error: str = "") -> None:
        """Set the final state of the reply."""
        self.stage = Stage.ENDED
        self.calls.clear()
        self.message = self.snapshot(finish, usage)
        if self.message is not None and error:
            self.message = replace(self.message, error=error)

    def snapshot(self, finish: Finish | None = None, usage: Usage | None = None) -> Message | None:
        """Return the message with all text received so far; None if the reply has not started."""
        return self.message and replace(
            self.message,
            text="".join(self._text),
            reasoning="".join(self._reasoning),
            reasoning_seconds=self.reasoning_seconds,
            steps=tuple(self._steps),
            finish=finish,
            usage=usage,
        )

    def _end_thinking(self) -> None:
        self._reasoning_seconds = self.reasoning_seconds
