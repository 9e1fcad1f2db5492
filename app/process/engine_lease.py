"""Who keeps an engine running that a chat has started: chats in terminals, each by a lock, and other programs, by use.

A chat holds a lock in the folder of the engine's process for as long as it lives, and the system takes it from the chat
however that ends. The engine ends itself when no chat is left and no other program has used it lately. Refuses to know
what a chat is, and what is asked of the engine.
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

CHAT_CLIENT = "ingle-chat"  # how chats name themselves in their requests

_CRASHED_SECONDS = 30.0  # that it stays for a chat that died, and will be started again
_FIRST_SECONDS = 60.0  # for the chat that started it to come
_LOCK_SECONDS = 5.0  # for the engine, which may be looking whether the lock is held
_POLL_SECONDS = 0.5  # seconds between two looks


@contextmanager
def hold_lease(settings: Settings, engine_pid: int) -> Iterator[None]:
    """This process needs the engine of that process while the body runs."""
    from filelock import FileLock

    folder = private_folder(_folder(settings, engine_pid))
    mark = folder / f"{os.getpid()}.lock"
    lock = FileLock(mark, mode=0o600)
    lock.acquire(timeout=_LOCK_SECONDS)
    try:
        yield
    finally:
        mark.unlink(missing_ok=True)  # who leaves in this way will not come back
        lock.release()


def count_other_leases(settings: Settings, engine_pid: int) -> int:
    """How many chats other than this process's need the engine."""
    own = f"{os.getpid()}.lock"
    marks = (mark for mark in _folder(settings, engine_pid).glob("*.lock") if mark.name != own)
    return sum(_is_held(mark) for mark in marks)


class EngineLeases:
    """Of this process, which is an engine that a chat has started."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` tells seconds that only grow."""
        self._clock = clock
        self._keep_alive = float(settings.keep_alive_s)
        self._folder = _folder(settings, os.getpid())
        self._stay_until = self._clock() + _FIRST_SECONDS
        self._others = 0  # requests of other programs under way
        self._was_used = False  # whether somebody has needed it yet

    def track_requests(self, application: "ASGIApp") -> "ASGIApp":
        """The application, whose use by other programs is noted."""

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
        """Have this process end itself, as by Ctrl-C, when nobody needs it any more; looked after by a thread."""
        threading.Thread(target=self._watch, name="engine leases", daemon=True).start()

    def is_expired(self) -> bool:
        """Whether nobody needs the engine. Asked again and again."""
        needed = bool(self._others)
        for mark in self._folder.glob("*.lock"):
            if _is_held(mark):
                needed = True
            else:  # it died: it is gone from the folder, but may come back
                mark.unlink(missing_ok=True)
                self._stay(_CRASHED_SECONDS)
        if needed and not self._was_used:  # from the first one on, nobody is waited for
            self._was_used, self._stay_until = True, self._clock()
        return not needed and self._clock() >= self._stay_until

    def _stay(self, seconds: float) -> None:
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
    """Whether a request asks for work, and does not come from a chat."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return False
    return not any(name == b"user-agent" and value.startswith(CHAT_CLIENT.encode()) for name, value in scope["headers"])
