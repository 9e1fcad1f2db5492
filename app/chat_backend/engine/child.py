"""The engine process that a chat starts: serves one model, and tells the chat on stdout how that comes along.

Run as `python -m app.chat_backend.engine.child FLAGS`, where FLAGS is a JSON object of settings and `stay`. Each line
that it writes is a `ChildMessage` in JSON. What goes wrong later goes to stderr, which the chat keeps in a file.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import msgspec
from msgspec import Struct

from app.errors import EXIT_FAILURE, EXIT_OK, exit_status
from app.process import memory_shortage
from app.process.engine_lease import EngineLeases
from app.process.listening import PortTaken
from app.process.memory_shortage import is_memory_shortage
from app.process.signals import interrupt_on_signals
from app.progress import Progress, Report, Unit
from app.settings.settings import Settings, load_settings
from quant.errors import InglenookError

_OFTEN = 0.1  # seconds between two lines about the same task


class ChildMessage(Struct, omit_defaults=True):
    """One line."""

    stage: str = ""  # what it is doing
    done: int = 0
    total: int | None = None
    unit: Unit = "bytes"
    note: str = ""  # something to be told
    problem: str = ""  # why it ends
    remedy: str = ""


class StdoutProgress:
    """A progress whose words go to stdout. Whoever reads them may be gone."""

    def __init__(self) -> None:
        self._encoder = msgspec.json.Encoder()

    @contextmanager
    def task(self, label: str, total: int | None, *, unit: Unit = "bytes") -> Iterator[Report]:
        told_at = 0.0

        def report(done: int) -> None:
            nonlocal told_at
            if (now := time.monotonic()) - told_at >= _OFTEN:
                told_at = now
                self.send(ChildMessage(stage=label, done=done, total=total, unit=unit))

        report(0)
        yield report

    def say(self, line: str) -> None:
        self.send(ChildMessage(note=line))

    def send(self, message: ChildMessage) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.buffer.write(self._encoder.encode(message) + b"\n")
            sys.stdout.buffer.flush()


def main(flags: str) -> int:
    """Serve until nobody needs it. Returns the exit status of the process."""
    interrupt_on_signals()
    progress = StdoutProgress()
    given = json.loads(flags)
    stay = given.pop("stay")
    try:
        settings = load_settings(**given)
        _serve(settings, progress, stay=stay)
    except InglenookError as problem:
        progress.send(ChildMessage(problem=problem.message, remedy=problem.remedy))
        return exit_status(problem)
    except KeyboardInterrupt:
        return EXIT_OK
    except Exception as problem:
        if not is_memory_shortage(problem):
            raise
        progress.send(ChildMessage(problem=memory_shortage.MESSAGE, remedy=memory_shortage.REMEDY))
        return EXIT_FAILURE
    return EXIT_OK


def _serve(settings: Settings, progress: Progress, *, stay: bool) -> None:
    """On the port of the settings; on any that is free, where that one is taken."""
    from app.server.host import run_host

    leases = None if stay else EngineLeases(settings)
    try:
        run_host(settings, progress, leases)
    except PortTaken:
        run_host(replace(settings, port=0), progress, leases)


if __name__ == "__main__":
    os.umask(0o077)
    sys.exit(main(sys.argv[1]))
