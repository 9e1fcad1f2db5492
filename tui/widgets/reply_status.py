"""One line below a running reply that shows its stage, its progress, and how to stop it."""

from collections.abc import Callable, Mapping
from time import monotonic

from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

from tui import figures
from tui.reply_progress import ReplyProgress, Stage
from tui.types import Message
from tui.widgets.tool_call import ALLOW, CHOOSE

_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_FRAMES_PER_SECOND = 8
_WITH_TEXT = 0.2  # seconds between two frames that new text causes, because each frame takes CPU time from the engine
_WITHOUT_TEXT = 0.3  # seconds after which the timer draws the line of a growing reply
_BAR = 18  # width of the progress bar in cells
_NARROW = 70  # in terminals with fewer cells in a line, the progress is a percentage


class ReplyStatus(Widget):
    """The status line, shown while a reply or a summary is generated."""

    DEFAULT_CSS = "ReplyStatus { height: 1; display: none; padding: 0 1; text-wrap: nowrap; text-overflow: ellipsis; }"

    frame: reactive[int] = reactive(0)

    def __init__(self) -> None:
        super().__init__()
        self._reply: ReplyProgress | None = None
        self._activity = ""
        self._since = 0.0  # when the activity started
        self._advanced_at = 0.0

    def on_mount(self) -> None:
        self._timer = self.set_interval(1 / _FRAMES_PER_SECOND, self.tick, pause=not self.display)

    def follow(self, reply: ReplyProgress | None, activity: str) -> None:
        """Show the status of a reply. Without a reply, show `activity`; if that is empty, hide the line."""
        if reply is self._reply and activity == self._activity:
            if self._is_growing and self._age >= _WITH_TEXT:  # more frames would delay the echo of keys
                self._advance()
            return
        self._reply, self._activity, self._since = reply, activity, monotonic()
        is_shown = reply is not None or bool(activity)
        if is_shown is not self.display:
            self.display = is_shown
            if self.is_attached:
                (self._timer.resume if is_shown else self._timer.pause)()
        self._advance()

    def tick(self) -> None:
        """Update the spinner and the figures. Those of a growing reply share the frames of its text."""
        if not self._is_growing or self._age >= _WITHOUT_TEXT:
            self._advance()

    @property
    def _is_growing(self) -> bool:
        return self._reply is not None and self._reply.stage in (Stage.THINKING, Stage.WRITING)

    @property
    def _age(self) -> float:
        """Seconds since the last frame of the spinner."""
        return monotonic() - self._advanced_at

    def _advance(self) -> None:
        self._advanced_at = monotonic()
        self.frame += 1

    @property
    def snapshot(self) -> Message | None:
        """The reply as a message with its text so far, or None if no reply has started."""
        return None if self._reply is None else self._reply.snapshot()

    def words(self, width: int) -> str:
        """Describe what is going on in at most `width` cells."""
        waited = f"{self._activity.capitalize()} {monotonic() - self._since:.0f} s"
        return waited if self._reply is None else describe(self._reply, width)

    @property
    def keys(self) -> str:
        """The keys that stop the reply, or answer its question."""
        is_asking = self._reply is not None and self._reply.asking
        return f"{ALLOW} to allow · {CHOOSE} to choose · esc to stop" if is_asking else "esc to stop"

    def render(self) -> Content:
        width, stop = self.content_size.width, self.keys
        spinner = _SPINNER[self.frame % len(_SPINNER)]
        left = Content.assemble((spinner, "$accent"), " ", (self.words(width), "$text-muted"))
        spare = width - left.cell_length - len(stop)
        return left if spare < 2 else Content.assemble(left, " " * spare, (stop, "$text-muted"))


def describe(reply: ReplyProgress, width: int) -> str:
    """Describe the stage of a reply in at most `width` cells."""
    return "Stopping" if reply.stopping else _STAGES[reply.stage](reply, width)


def _reading(reply: ReplyProgress, width: int) -> str:
    progress, left = reply.prompt, reply.seconds_left
    if progress is None:
        return "Reading your message"
    rest = f"  {figures.time_left(left)}" if left is not None else ""
    if width < _NARROW:
        return f"Reading your message  {figures.percent(progress.done, progress.total)}{rest}"
    bar = figures.bar(progress.done, progress.total, _BAR)
    return f"Reading your message  {bar}  {progress.done:,} / {progress.total:,} tokens{rest}"


def _growing(reply: ReplyProgress, _: int) -> str:
    tokens = f"{reply.tokens:,} {'token' if reply.tokens == 1 else 'tokens'}"
    speed = f"{reply.tokens_per_second:.0f} tok/s · " if reply.tokens_per_second else ""
    return f"{speed}{tokens} · {reply.stage_seconds:.0f} s"


def _calling(reply: ReplyProgress, _: int) -> str:
    if reply.asking is not None:
        return "Waiting for your permission"
    name = next((call.name for call in reply.calls.values()), "a tool")
    return f"Running {name} {reply.stage_seconds:.0f} s"


_STAGES: Mapping[Stage, Callable[[ReplyProgress, int], str]] = {
    Stage.WAITING: lambda reply, _: f"Waiting for the model {reply.stage_seconds:.0f} s",
    Stage.RESTARTING: lambda reply, _: f"Starting the engine again {reply.stage_seconds:.0f} s",
    Stage.READING: _reading,
    Stage.THINKING: _growing,  # the line of the reasoning says that the model thinks
    Stage.WRITING: _growing,
    Stage.CALLING: _calling,
    Stage.ENDED: lambda *_: "",
}
