"""Progress of loading or downloading a model: its state, its rate, and lines that describe it."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable

from app.progress import Unit
from tui.client import ClientError, NotLoaded
from tui.engine_types import Loading
from tui.figures import loading, size, size_of, time_left
from tui.plain_text import model_name

_WINDOW = 5.0  # length in seconds of the window over which the rate is averaged
_STEADY = 2.0  # seconds until the rate is reported: files are opened and connections start slowly


class DownloadRate:
    """The rate of a download or a load. A new label starts a new measurement."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._label = ""
        self._marks: deque[tuple[float, int]] = deque()  # (time, units done at that time)

    def after(self, label: str, done: int) -> float:
        """Return the rate in units per second, given that `done` units have been transferred.

        Returns 0 until the rate is steady. Units that were there at the first call are not counted.
        """
        if label != self._label or (self._marks and (done < self._marks[-1][1] or not self._marks[-1][1])):
            self._label = label
            self._marks.clear()
        now = self._clock()
        self._marks.append((now, done))
        while now - self._marks[0][0] > _WINDOW:
            self._marks.popleft()
        start, before = self._marks[0]
        return (done - before) / (now - start) if now - start >= _STEADY else 0.0


def describe_stage(model: str, stage: str, done: int, total: int | None, unit: Unit, rate: DownloadRate) -> Loading:
    """Describe a loading stage of a model, with speed and time left for byte counts."""
    if not total:
        return Loading(model, stage)
    amount = ""
    if unit == "bytes":
        speed = rate.after(stage, done)
        pace = (f"{size(round(speed))}/s", time_left((total - done) / speed)) if speed else ()
        amount = ", ".join((size_of(done, total), *pace))
    elif unit == "kernels":
        amount = f"{done} of {total}"
    return Loading(model, stage, done / total, amount=amount)


LINE_SECONDS = 5.0  # seconds between two lines about one load


class LoadingLines:
    """Describes one load in lines of text, at most one every LINE_SECONDS."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_time: float | None = None
        self._last_line = ""

    def line(self, state: Loading) -> str:
        """Return the line that describes this state; empty if it is not due or repeats the last one."""
        if state.warning:
            return f"{model_name(state.model)}: {state.warning}"
        words, now = loading(state), self._clock()
        if words == self._last_line or (self._last_time is not None and now - self._last_time < LINE_SECONDS):
            return ""
        self._last_time, self._last_line = now, words
        return words


class LoadingState:
    """The state of one load, which ends exactly once: loaded or failed. Used on one event loop."""

    def __init__(self, model: str, stage: str = "starting") -> None:
        """Start the state of a load. `stage`: description of the first stage."""
        self.model = model
        self.now = Loading(model, stage)
        self._changed = asyncio.Event()
        self._version = 0
        self.is_over = False
        self.problem: ClientError | None = None

    def update(self, model: str, stage: str) -> None:
        self.show(Loading(model, stage))

    def show(self, now: Loading) -> None:
        """Replace the state, unless the load has ended."""
        if not self.is_over:
            self.now = now
            self._version += 1
            self._notify()

    def succeed(self, model: str, warning: str = "") -> None:
        """End the load as successful. `model`: name of the loaded model. `warning`: a message for the user."""
        self.show(Loading(model, "loaded", loaded=True, warning=warning))
        self.finish()

    def finish(self, problem: ClientError | None = None) -> None:
        """End the load, with `problem` if it failed. Later changes have no effect."""
        if self.is_over:
            return
        self.is_over, self.problem = True, problem
        self._notify()

    async def wait(self) -> None:
        """Wait until the load ends. Raises NotLoaded if it failed."""
        while not self.is_over:
            await self._changed.wait()
        if self.problem is not None:
            raise NotLoaded(self.problem.message, self.problem.remedy) from self.problem

    async def states(self) -> AsyncGenerator[Loading, None]:
        """Yield the current state and every later one, and raise the error if the load failed.

        A slow consumer misses intermediate states, but always receives the last one.
        """
        seen = -1
        while self._version != seen or not self.is_over:
            if self._version != seen:
                seen = self._version
                yield self.now
            else:
                await self._changed.wait()
        if self.problem is not None:
            raise self.problem

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
