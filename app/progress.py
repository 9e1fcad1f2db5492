"""What a long task tells the person who waits: a bar on a terminal, a few lines elsewhere, or nothing.

Of what takes less than a second nothing is told. Everything goes to stderr; stdout is for data. Whoever does the work
knows only the `Progress` protocol. Colour and terminal width are left to rich, which honours NO_COLOR and FORCE_COLOR;
it is imported when the first bar is drawn.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Literal, Protocol

import click

if TYPE_CHECKING:
    import rich.progress

_WIDE = 90  # columns of a terminal that has room for a bar
_OFTEN = 30.0  # seconds between two lines about the same task
_A_WHILE = 1.0  # seconds until a task is told of

Unit = Literal["bytes", "tokens", "products"]
Report = Callable[[int], None]  # takes the amount done so far


class Progress(Protocol):
    """Where a long task reports to."""

    def task(self, label: str, total: int | None, *, unit: Unit = "bytes") -> AbstractContextManager[Report]:
        """A piece of work of `total` units; None when there is nothing to count."""
        ...

    def say(self, line: str) -> None:
        """One line of narration."""
        ...


class SilentProgress:
    """Says nothing: --quiet."""

    @contextmanager
    def task(self, label: str, total: int | None, *, unit: Unit = "bytes") -> Iterator[Report]:
        yield lambda done: None

    def say(self, line: str) -> None:
        pass


class LineProgress:
    """A line about a task that takes a while, some on the way, and one when it is done; for logs and pipes."""

    @contextmanager
    def task(self, label: str, total: int | None, *, unit: Unit = "bytes") -> Iterator[Report]:
        told = threading.Event()

        def tell() -> None:
            told.set()
            self.say(f"{label} ({_amount(total, unit)})" if total else label)

        started = last = time.monotonic()

        def tell_on_the_way(done: int) -> None:
            nonlocal last
            if total and (now := time.monotonic()) - last >= _OFTEN:
                last = now
                self.say(f"{label}: {100 * done // total} %")

        with _after_a_while(tell):
            yield tell_on_the_way
        if told.is_set():
            self.say(f"{label}: done in {time.monotonic() - started:.1f} s")

    def say(self, line: str) -> None:
        click.echo(line, err=True)


class BarProgress:
    """A live bar with amount, speed and time left, for a task that takes a while; it is gone when the task is done."""

    def __init__(self) -> None:
        self._bars: list[_Bar] = []  # of the tasks that go on, the innermost last

    @contextmanager
    def task(self, label: str, total: int | None, *, unit: Unit = "bytes") -> Iterator[Report]:
        bar = _Bar(label, total, unit)
        self._bars.append(bar)
        try:
            with _after_a_while(bar.show):
                yield bar.report
        finally:
            self._bars.remove(bar)
            bar.hide()

    def say(self, line: str) -> None:
        if self._bars:
            self._bars[0].say(line)
        else:
            click.echo(line, err=True)


class _Bar:
    """A bar that is made when it is to be shown."""

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
        narrow = console.width < _WIDE
        # Where room is short, the words give way to the figures, and there is no bar.
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
        """A line above the bar, if there is one."""
        if self._bar is None:
            click.echo(line, err=True)
        else:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def hide(self) -> None:
        if self._bar is not None:
            self._bar.stop()


@contextmanager
def _after_a_while(action: Callable[[], None]) -> Iterator[None]:
    """Call `action`, in a thread of its own, when what is inside takes long; never after its end."""
    timer = threading.Timer(_A_WHILE, action)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def progress_on_stderr(*, quiet: bool = False) -> Progress:
    """The progress that suits where stderr goes."""
    if quiet:
        return SilentProgress()
    return BarProgress() if sys.stderr.isatty() else LineProgress()


def _amount(count: int, unit: Unit) -> str:
    return format_bytes(count) if unit == "bytes" else f"{count} {unit}"


def format_bytes(count: int) -> str:
    """A size for people, in decimal units as disks and downloads are sold: "98.4 MB"."""
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 999.95:
            return f"{count} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"
