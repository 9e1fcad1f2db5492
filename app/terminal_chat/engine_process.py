"""An engine process, as the chat that starts it sees it: what it tells while it loads, and where it is reached then.

The process has a session of its own: neither Ctrl-C in the terminal nor the end of the chat ends it. It ends itself
when nobody needs it (app/attendance.py), or is stopped here.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from app.apart import begin_apart
from app.config import Settings, child_environment
from app.errors import AppError
from app.instance import Instance, running_instances
from app.terminal_chat.engine_child import Said
from engine.private_folder import private_folder

ROOT = Path(__file__).parents[2]  # the folder that `app` is in, whether installed or not
_GLANCE = 0.05  # seconds between two looks whether it serves
_STOP_SECONDS = 10.0
_TAIL = 400  # bytes of what it said on stderr, where it ended without a word
LOG = "engine.log"
PREVIOUS_LOG = "engine.log.1"  # of the engine before: one that died has said there why


class EngineFailed(AppError):
    """An engine process ended before it served."""


class EngineProcess:
    """One engine process, from its start on. Used on one event loop."""

    def __init__(self, process: "subprocess.Popen[bytes]", settings: Settings, model: str) -> None:
        self._process = process
        self._settings = settings
        self._log = settings.state_dir / LOG
        self._listening: asyncio.Future[None] | None = None
        self.model = model

    @classmethod
    def start(cls, settings: Settings, model: str, flags: Mapping[str, object]) -> "EngineProcess":
        """`flags` are settings that were given on the command line, and `stay`. Raises OSError."""
        given = json.dumps({**flags, "model": model})
        with _new_log(private_folder(settings.state_dir)) as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "app.terminal_chat.engine_child", given],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                env=child_environment(),
                start_new_session=True,
            )
        return cls(process, settings, model)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    async def serving(self, heard: Callable[[Said], None]) -> Instance:
        """Wait until it serves; `heard` is given what it says meanwhile. Raises EngineFailed."""
        loop = asyncio.get_running_loop()
        # The process may outlive this one, which does not wait for it at its end, as it would for the loop's threads.
        self._listening = asyncio.wrap_future(begin_apart(lambda: self._listen(loop, heard)))
        while (instance := await asyncio.to_thread(self._found)) is None:
            if self.has_ended:
                await asyncio.wait({self._listening})
                raise self._failure()
            await asyncio.sleep(_GLANCE)
        return instance

    def _found(self) -> Instance | None:
        instances = running_instances(self._settings)
        return next((instance for instance in instances if instance.pid == self.pid), None)

    def _listen(self, loop: asyncio.AbstractEventLoop, heard: Callable[[Said], None]) -> None:
        """On a thread of its own, up to the end of the process: nothing that it says may make it wait."""
        self._last = Said()
        if self._process.stdout is None:
            return
        for line in self._process.stdout:
            with suppress(msgspec.DecodeError):
                self._last = msgspec.json.decode(line, type=Said)
                with suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(heard, self._last)

    def _failure(self) -> EngineFailed:
        if self._last.problem:
            return EngineFailed(self._last.problem, self._last.remedy)
        with suppress(OSError):
            said = self._log.read_bytes()[-_TAIL:].decode(errors="replace").strip()
            return EngineFailed(f"the engine ended with status {self._process.returncode}: {said}", str(self._log))
        return EngineFailed(f"the engine ended with status {self._process.returncode}", "ingle doctor")

    async def stop(self) -> None:
        """Ask it to end, and wait; then end it."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, _STOP_SECONDS)
        self._process.kill()
        if self._listening is not None:
            await asyncio.wait({self._listening})
        await asyncio.to_thread(self._reap)

    def _reap(self) -> None:
        """Wait for its end, and close its pipe."""
        with self._process:
            pass


def _new_log(folder: Path) -> BinaryIO:
    with suppress(OSError):
        (folder / LOG).replace(folder / PREVIOUS_LOG)
    return open(os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")
