"""The engine process of a chat, and other commands of this program that run in child processes.

The process of the screens imports no torch, so code that needs torch runs in a child process.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from app.chat_backend.engine.child import ChildMessage
from app.client.running_server import start_service
from app.errors import EXIT_FAILURE, EngineFailed
from app.process.instance import Instance, running_instances
from app.process.uninterruptible import start_uninterruptible
from app.settings.settings import Settings, child_environment
from app.whole_file import write_whole
from engine.private_folder import private_folder

Found = TypeVar("Found")


def memory_option(memory: int) -> tuple[str, ...]:
    """Return the option --memory for `memory` bytes. 0 gives no option: `ingle` then measures the memory."""
    return ("--memory", f"{memory / 1e9:.6f}GB") if memory else ()


async def run_ingle(*words: str) -> tuple[int | None, bytes, bytes]:
    """Run `ingle` with these arguments. Returns exit status, stdout, and stderr. Cancellation kills the process."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "app", *words,
        cwd=ROOT, env=child_environment(), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        out, err = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.communicate()  # drain and close the pipes
        raise
    return process.returncode, out, err


def error_message(err: bytes, otherwise: str) -> str:
    """Return the error message from a command's stderr, or `otherwise` if there is none."""
    lines = err.decode(errors="replace").splitlines()
    errors = (line[len("error: ") :] for line in lines if line.lower().startswith("error: "))
    return next(errors, otherwise)


ROOT = Path(__file__).parents[3]  # the folder that contains the package `app`
_GLANCE = 0.05  # seconds between two checks whether the process serves
_STOP_SECONDS = 10.0
_TAIL = 400  # number of bytes of stderr to report if the process ended without a message
_TURN_SECONDS = 0.2  # seconds between two checks whether another process has started the engine
LOCK = "engine.lock"  # held while a process starts an engine
LOADING = "engine.model"  # file with the model that the holder of the lock is loading
LOG = "engine.log"
PREVIOUS_LOG = "engine.log.1"  # log of the previous engine process, which may contain its last error


class EngineProcess:
    """One engine process. Used on one event loop."""

    def __init__(self, process: "subprocess.Popen[bytes]", settings: Settings, model: str) -> None:
        self._process = process
        self._settings = settings
        self._log = settings.state_dir / LOG
        self._listening: asyncio.Future[None] | None = None
        self.model = model

    @classmethod
    def start(cls, settings: Settings, model: str, flags: Mapping[str, object]) -> "EngineProcess":
        """Start an engine process. `flags` are the settings from the command line and `stay`. Raises OSError."""
        given = json.dumps({**flags, "model": model})
        with _new_log(private_folder(settings.state_dir)) as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "app.chat_backend.engine.child", given],
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

    async def wait_until_serving(self, on_message: Callable[[ChildMessage], None]) -> Instance:
        """Wait until the process serves. Until then, pass its messages to `on_message`. Raises EngineFailed."""
        loop = asyncio.get_running_loop()
        # Runs on a daemon thread, because the engine may outlive this process: a thread of the loop's pool would delay
        # exit.
        self._listening = asyncio.wrap_future(start_uninterruptible(lambda: self._listen(loop, on_message)))
        while (instance := await asyncio.to_thread(self._found)) is None:
            if self.has_ended:
                await asyncio.wait({self._listening})
                raise self._failure()
            await asyncio.sleep(_GLANCE)
        return instance

    async def wait_until_exit(self) -> None:
        """Wait until the process has exited. Its stdout closes then, so no polling is necessary."""
        if self._listening is not None:
            await asyncio.wait({self._listening})
        await asyncio.to_thread(self._process.wait)

    def _found(self) -> Instance | None:
        instances = running_instances(self._settings)
        return next((instance for instance in instances if instance.pid == self.pid), None)

    def _listen(self, loop: asyncio.AbstractEventLoop, on_message: Callable[[ChildMessage], None]) -> None:
        """Read messages until the process exits, so that it never blocks on a full pipe. Runs on a thread."""
        self._last = ChildMessage()
        if self._process.stdout is None:
            return
        for line in self._process.stdout:
            with suppress(msgspec.DecodeError):
                self._last = msgspec.json.decode(line, type=ChildMessage)
                with suppress(RuntimeError):  # the event loop is closed
                    loop.call_soon_threadsafe(on_message, self._last)

    def _failure(self) -> EngineFailed:
        code = self._process.returncode
        status = code if code and code > 0 else EXIT_FAILURE  # negative: a signal ended it
        if self._last.problem:
            return EngineFailed(self._last.problem, self._last.remedy, status)
        with suppress(OSError):
            said = self._log.read_bytes()[-_TAIL:].decode(errors="replace").strip()
            return EngineFailed(f"the engine ended with status {code}: {said}", f"See {self._log}.", status)
        return EngineFailed(f"the engine ended with status {code}", "Run ingle doctor.", status)

    async def stop(self) -> None:
        """Terminate the process, wait, and kill it if it does not exit."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, _STOP_SECONDS)
        self._process.kill()
        if self._listening is not None:
            await asyncio.wait({self._listening})
        await asyncio.to_thread(self._reap)

    def _reap(self) -> None:
        """Wait until the process has exited, and close its pipe."""
        with self._process:
            pass


async def find_or_start(
    settings: Settings,
    find: Callable[[], Awaitable[Found | None]],
    start: Callable[[], Awaitable[Found]],
    on_wait: Callable[[str], None],
) -> Found:
    """Return what `find` returns; if that is None, the server of the installed service, or the result of `start`.

    Only one process of the user starts an engine at a time. The others wait, call `on_wait` with the model that it
    loads, and then search again.
    """
    from filelock import FileLock, Timeout

    lock, loading = FileLock(settings.state_dir / LOCK, mode=0o600, thread_local=False), settings.state_dir / LOADING
    while True:
        if (found := await find()) is not None:
            return found
        try:
            private_folder(settings.state_dir)
            lock.acquire(timeout=0)
            break
        except Timeout:
            model = absolute(settings.model)
            with suppress(OSError):  # the other process has not written it yet
                model = loading.read_text()
            on_wait(model)
            await asyncio.sleep(_TURN_SECONDS)
    try:
        await asyncio.to_thread(write_whole, loading, absolute(settings.model).encode(), 0o600)
        if await start_service(settings) and (found := await find()) is not None:
            return found
        return await start()
    finally:
        lock.release()


def absolute(model: str) -> str:
    """Return an absolute path if `model` is an existing path; otherwise return `model` unchanged."""
    path = Path(model).expanduser()
    return str(path.absolute()) if path.exists() else model


def _new_log(folder: Path) -> BinaryIO:
    with suppress(OSError):
        (folder / LOG).replace(folder / PREVIOUS_LOG)
    return open(os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")
