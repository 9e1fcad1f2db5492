"""What a long task tells the person who waits: a bar on a terminal, a few lines elsewhere, or nothing.

Everything goes to stderr; stdout is for data. Whoever does the work knows only the `Progress` protocol. Colour and
terminal width are left to rich, which honours NO_COLOR and FORCE_COLOR; it is imported when the first bar is drawn.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import click

_A_WHILE = 1.0  # seconds

Report = Callable[[int], None]  # takes the bytes done so far


class Progress(Protocol):
    """Where a long task reports to."""

    def task(self, label: str, total: int | None) -> AbstractContextManager[Report]:
        """A piece of work of `total` bytes; None when there is nothing to count."""
        ...

    def say(self, line: str) -> None:
        """One line of narration."""
        ...


class SilentProgress:
    """Says nothing: --quiet."""

    @contextmanager
    def task(self, label: str, total: int | None) -> Iterator[Report]:
        yield lambda done: None

    def say(self, line: str) -> None:
        pass


class LineProgress:
    """A line when a task begins, and one when it is done if that took a while; for logs and pipes."""

    @contextmanager
    def task(self, label: str, total: int | None) -> Iterator[Report]:
        self.say(f"{label} ({format_bytes(total)})" if total else label)
        started = time.monotonic()
        yield lambda done: None
        if (seconds := time.monotonic() - started) > _A_WHILE:
            self.say(f"{label}: done in {seconds:.1f} s")

    def say(self, line: str) -> None:
        click.echo(line, err=True)


class BarProgress:
    """A live bar with amount, speed and time left; it is gone when the task is done."""

    @contextmanager
    def task(self, label: str, total: int | None) -> Iterator[Report]:
        from rich.console import Console
        from rich.markup import escape
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as RichProgress

        amounts = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()) if total else ()
        columns = (TextColumn("{task.description}"), BarColumn(), *amounts)
        with RichProgress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(escape(label), total=total)
            yield lambda done: bar.update(task, completed=done)

    def say(self, line: str) -> None:
        click.echo(line, err=True)


def progress_on_stderr(*, quiet: bool = False) -> Progress:
    """The progress that suits where stderr goes."""
    if quiet:
        return SilentProgress()
    return BarProgress() if sys.stderr.isatty() else LineProgress()


def format_bytes(count: int) -> str:
    """A size for people, in decimal units as disks and downloads are sold: "98.4 MB"."""
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 999.95:
            return f"{count} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"
