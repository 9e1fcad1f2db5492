"""Leases on an engine that a chat or `ingle run` has started: it keeps running while a chat or another program uses it.

A chat holds a lease: a locked file in the folder of the engine's process. The system releases the lock when the chat
ends or crashes. `ingle run` holds one until its answer is complete. Requests of other programs count for a while after
they end. The engine exits when no lease is held and no other program has used it recently.
"""

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from app.settings.settings import Settings
from engine.private_folder import private_folder

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

CHAT_CLIENT = "ingle-chat"  # user agent of chats

_CRASHED_SECONDS = 30.0  # seconds that the engine waits for a crashed chat to be restarted
_FIRST_SECONDS = 60.0  # seconds that the engine waits for its first chat
_LOCK_SECONDS = 5.0  # longest wait for a lock, which the engine may hold for a moment to test it
_POLL_SECONDS = 0.5  # seconds between two checks


@contextmanager
def hold_lease(settings: Settings, engine_pid: int) -> Iterator[None]:
    """Hold a lease on the engine of process `engine_pid` while the body runs."""
    from filelock import FileLock

    folder = private_folder(_folder(settings, engine_pid))
    mark = folder / f"{os.getpid()}.lock"
    lock = FileLock(mark, mode=0o600)
    lock.acquire(timeout=_LOCK_SECONDS)
    try:
        yield
    finally:
        mark.unlink(missing_ok=True)  # a chat that ends normally is not restarted, so it leaves no file
        lock.release()


def count_other_leases(settings: Settings, engine_pid: int) -> int:
    """Return the number of other chats that hold a lease on the engine, without the chat of this process."""
    own = f"{os.getpid()}.lock"
    marks = (mark for mark in _folder(settings, engine_pid).glob("*.lock") if mark.name != own)
    return sum(_is_held(mark) for mark in marks)


class EngineLeases:
    """The leases on the engine of this process."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        """Start the wait for the first chat. `clock` returns monotonic seconds."""
        self._clock = clock
        self._keep_alive = float(settings.keep_alive_s)
        self._folder = _folder(settings, os.getpid())
        self._stay_until = self._clock() + _FIRST_SECONDS
        self._others = 0  # running requests from other programs
        self._was_used = False  # whether a chat or another program has used the engine

    def track_requests(self, application: "ASGIApp") -> "ASGIApp":
        """Wrap the application so that requests from other programs keep the engine running."""

        async def tracked(scope: "Scope", receive: "Receive", send: "Send") -> None:
            if not _is_use_by_others(scope):
                await application(scope, receive, send)
                return
            self._others += 1
            try:
                await application(scope, receive, send)
            finally:
                self._others -= 1
                self._stay(self._keep_alive)

        return tracked

    def exit_when_unused(self) -> None:
        """Start a thread that sends SIGTERM to this process when the leases have expired, also during a load."""
        threading.Thread(target=self._watch, name="engine leases", daemon=True).start()

    def is_expired(self) -> bool:
        """Whether no chat and no other program uses the engine. Call it repeatedly: it also removes the leases of dead
        chats.
        """
        needed = bool(self._others)
        for mark in self._folder.glob("*.lock"):
            if _is_held(mark):
                needed = True
            else:  # the chat crashed, and may be restarted
                mark.unlink(missing_ok=True)
                self._stay(_CRASHED_SECONDS)
        if needed:
            self._mark_used()
        return not needed and self._clock() >= self._stay_until

    def _mark_used(self) -> None:
        """End the wait for the first chat."""
        if not self._was_used:
            self._was_used, self._stay_until = True, self._clock()

    def _stay(self, seconds: float) -> None:
        self._mark_used()
        self._stay_until = max(self._stay_until, self._clock() + seconds)

    def _watch(self) -> None:
        while not self.is_expired():
            time.sleep(_POLL_SECONDS)
        shutil.rmtree(self._folder, ignore_errors=True)
        os.kill(os.getpid(), signal.SIGTERM)


def _folder(settings: Settings, engine_pid: int) -> Path:
    # The name of the folder predates the term "lease". Engines of earlier versions, which may still run, look there.
    return settings.state_dir / "attendance" / str(engine_pid)


def _is_held(mark: Path) -> bool:
    from filelock import FileLock, Timeout

    if not mark.exists():
        return False
    lock = FileLock(mark, mode=0o600)
    with suppress(Timeout):
        lock.acquire(timeout=0)
        lock.release()
        return False
    return True


def _is_use_by_others(scope: "Scope") -> bool:
    """Whether a request needs the engine and does not come from a chat."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return False
    return not any(name == b"user-agent" and value.startswith(CHAT_CLIENT.encode()) for name, value in scope["headers"])
