"""The engine process that a chat or `ingle run` starts: serves models and reports its progress on stdout.

Run as `python -m app.chat_backend.engine.child FLAGS`, where FLAGS is a JSON object of settings and `stay`. Each line
on stdout is a `ChildMessage` in JSON. Later errors go to stderr, which is redirected to a file.
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

_OFTEN = 0.1  # seconds between two progress messages about the same task


class ChildMessage(Struct, omit_defaults=True):
    """One line on stdout."""

    stage: str = ""  # description of what the process is doing
    done: int = 0
    total: int | None = None
    unit: Unit = "bytes"
    note: str = ""  # a message for the user
    problem: str = ""  # reason why the process ends
    remedy: str = ""


class StdoutProgress:
    """Writes progress to stdout. Write errors are ignored, because the process that reads it may have exited."""

    def __init__(self) -> None:
        self._encoder = msgspec.json.Encoder()

    @contextmanager
    def task(self, label: str, total: int | None, *, unit: Unit = "bytes") -> Iterator[Report]:
        sent_at = 0.0

        def report(done: int) -> None:
            nonlocal sent_at
            if (now := time.monotonic()) - sent_at >= _OFTEN:
                sent_at = now
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
    """Serve until no chat uses the engine. Returns the exit status."""
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
    """Serve on the port from the settings, or on a free port if that one is taken."""
    from app.server.host import run_host

    leases = None if stay else EngineLeases(settings)
    if leases is not None:
        leases.exit_when_unused()
    try:
        run_host(settings, progress, leases)
    except PortTaken:
        run_host(replace(settings, port=0), progress, leases)


if __name__ == "__main__":
    os.umask(0o077)
    sys.exit(main(sys.argv[1]))
