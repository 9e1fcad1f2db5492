"""Progress of long tasks: a bar on a terminal, a few lines elsewhere, or nothing.

Tasks that take less than a second show nothing. All output goes to stderr; stdout is for data. Code that reports
progress uses the `Progress` protocol only. The rich library handles color and terminal width, and honors NO_COLOR and
FORCE_COLOR. It is imported when the first bar is drawn.
"""

import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Literal, Protocol

import click

from app.terminal_width import terminal_width

if TYPE_CHECKING:
    import rich.progress

_BAR_COLUMNS = 90  # columns of the narrowest terminal on which a bar is drawn
_LINE_SECONDS = 30.0  # seconds between two lines about the same task
_DELAY_SECONDS = 1.0  # seconds after which a running task is shown

Unit = Literal["bytes", "tokens", "products", "kernels"]
Report = Callable[[int], None]  # takes the amount done so far


class Progress(Protocol):
    """Receives the progress of long tasks."""

    def task(self, label: str, total: int | None, *, unit: Unit = "bytes") -> AbstractContextManager[Report]:
        """Show a task while the body runs. `total`: its size in units, or None if it cannot be counted."""
        ...

    def say(self, line: str) -> None:
        """Print one line."""
        ...


class SilentProgress:
    """Prints nothing, for --quiet."""

    @contextmanager
    def task(self, label: str, total: int | None, *, unit: Unit = "bytes") -> Iterator[Report]:
        yield lambda done: None

    def say(self, line: str) -> None:
        pass


class LineProgress:
    """Prints lines about a task that takes long: at the start, every 30 seconds, and at the end. For logs and pipes."""

    @contextmanager
    def task(self, label: str, total: int | None, *, unit: Unit = "bytes") -> Iterator[Report]:
        shown = threading.Event()

        def show() -> None:
            shown.set()
            self.say(f"{label} ({_amount(total, unit)})" if total else label)

        started = last = time.monotonic()

        def report(done: int) -> None:
            nonlocal last
            if total and (now := time.monotonic()) - last >= _LINE_SECONDS:
                last = now
                self.say(f"{label}: {100 * done // total} %")

        with _after_delay(show):
            yield report
        if shown.is_set():
            self.say(f"{label}: done in {time.monotonic() - started:.1f} s")

    def say(self, line: str) -> None:
        click.echo(line, err=True)


class BarProgress:
    """Draws a live bar with amount, speed, and time left for a long task. The bar disappears when the task ends."""

    def __init__(self) -> None:
        self._bars: list[_Bar] = []  # bars of the running tasks, the innermost last

    @contextmanager
    def task(self, label: str, total: int | None, *, unit: Unit = "bytes") -> Iterator[Report]:
        bar = _Bar(label, total, unit)
        self._bars.append(bar)
        try:
            with _after_delay(bar.show):
                yield bar.report
        finally:
            self._bars.remove(bar)
            bar.hide()

    def say(self, line: str) -> None:
        wrapped = "\n".join(map(wrapped_line, line.splitlines()))
        if self._bars:
            self._bars[0].say(wrapped)
        else:
            click.echo(wrapped, err=True)


class _Bar:
    """A bar of one task. Until `show` is called, nothing is drawn and rich is not imported."""

    def __init__(self, label: str, total: int | None, unit: Unit) -> None:
        self._label, self._total, self._unit = label, total, unit
        self._done = 0
        self._bar: rich.progress.Progress | None = None

    def show(self) -> None:
        from rich import progress as rich
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Column

        amounts: Sequence[rich.ProgressColumn] = (rich.MofNCompleteColumn(), rich.TextColumn(self._unit))
        if self._unit == "bytes":
            amounts = rich.DownloadColumn(), rich.TransferSpeedColumn()
        counted = (*amounts, rich.TimeRemainingColumn()) if self._total else ()
        console = Console(stderr=True)
        narrow = console.width < _BAR_COLUMNS
        # A narrow terminal shows no bar, and shortens the label rather than the figures.
        words = rich.TextColumn("{task.description}", table_column=Column(ratio=1 if narrow else None, no_wrap=True))
        columns = (words, *counted) if narrow and counted else (words, rich.BarColumn(), *counted)
        bar = rich.Progress(*columns, console=console, transient=True, expand=narrow)
        bar.add_task(escape(self._label), total=self._total, completed=self._done)
        bar.start()
        self._bar = bar

    def report(self, done: int) -> None:
        self._done = done
        if self._bar is not None:
            [task] = self._bar.task_ids
            self._bar.update(task, completed=done)

    def say(self, line: str) -> None:
        """Print a line above the bar, if there is one."""
        if self._bar is None:
            click.echo(line, err=True)
        else:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def hide(self) -> None:
        if self._bar is not None:
            self._bar.stop()


class StageProgress:
    """Shows the stages of a task of another process, which reports them one at a time. Call `close` at the end."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = ExitStack()
        self._stage = ""
        self._report: Report | None = None

    def show(self, stage: str, done: int, total: int | None, unit: Unit = "bytes") -> None:
        if stage != self._stage or self._report is None:
            self.close()
            self._stage = stage
            self._report = self._task.enter_context(self._progress.task(stage, total, unit=unit))
        self._report(done)

    def close(self) -> None:
        self._report = None
        self._task.close()


def wrapped_line(line: str) -> str:
    """Wrap a line between words at the width of the terminal on stderr, which would break words."""
    width = terminal_width(sys.stderr)
    return textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False) if width else line


@contextmanager
def _after_delay(action: Callable[[], None]) -> Iterator[None]:
    """Call `action` in another thread if the body takes more than a second; never after the body has ended."""
    timer = threading.Timer(_DELAY_SECONDS, action)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def progress_on_stderr(*, quiet: bool = False) -> Progress:
    """Return the progress that fits stderr: bars on a terminal, lines elsewhere, nothing if `quiet`."""
    if quiet:
        return SilentProgress()
    return BarProgress() if sys.stderr.isatty() else LineProgress()


def _amount(count: int, unit: Unit) -> str:
    return format_bytes(count) if unit == "bytes" else f"{count} {unit}"


def format_bytes(count: int) -> str:
    """Return a size in decimal units, such as "98.4 MB"."""
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 999.95:
            return f"{count} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"
