"""Runs the user's editor on a temporary file with a draft. Meanwhile, the chat leaves the terminal to the editor."""

import asyncio
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from textual.app import App, SuspendNotSupported

from tui.client import ClientError
from tui.drafts import read_attachment
from tui.plain_text import sanitize_paste

_USUAL = ("nano", "vi")
_WINDOWS = ("notepad",)
_ENDING_SECONDS = 1.0
_REMEDY = "The draft is unchanged. VISUAL or EDITOR names the editor."


def pick_editor(chosen: str, platform: str, is_installed: Callable[[str], bool]) -> Sequence[str]:
    """Return the command of the editor: `chosen`, split as a shell does, or a common editor if it is empty."""
    if chosen.strip():
        return shlex.split(chosen, posix=platform != "win32")
    usual = _WINDOWS if platform == "win32" else _USUAL
    return [next((name for name in usual if is_installed(name)), usual[-1])]


async def edit(app: App[None], chosen: str, draft: str) -> str:
    """Let the user edit `draft` in an editor, and return the saved text. Raises ClientError if the editor fails."""
    with tempfile.TemporaryDirectory(prefix="ingle-") as folder:  # only this user can read the folder
        file = Path(folder, "message.md")
        try:
            command = pick_editor(chosen, sys.platform, lambda name: shutil.which(name) is not None)
            file.write_text(draft, encoding="utf-8")
            with _suspended(app):
                status = await _run([*command, str(file)])
        except (OSError, ValueError) as error:  # ValueError: a quote in the command is not closed
            reason = error.strerror if isinstance(error, OSError) else error
            raise ClientError(f"The editor could not be started: {chosen or command[0]}: {reason}.", _REMEDY) from error
        if status != 0:
            raise ClientError(f"The editor ended with status {status}.", _REMEDY)
        return sanitize_paste(read_attachment(file).text).removesuffix("\n")  # editors add a line end to the last line


@contextmanager
def _suspended(app: App[None]) -> Iterator[None]:
    """Leave the terminal to another program. On Windows the editor has a window, and the chat stays visible."""
    failure: Exception | None = None
    with ExitStack() as stack:
        stack.enter_context(app.batch_update())  # the chat draws nothing while the editor runs
        with suppress(SuspendNotSupported):
            stack.enter_context(app.suspend())
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised below: Textual does not take the terminal back if one is raised
            failure = error
    if failure is not None:
        raise failure


async def _run(command: Sequence[str]) -> int:
    """Run a program in the terminal, and return its exit status. The chat receives replies meanwhile."""
    process = await asyncio.create_subprocess_exec(*command)
    try:
        with _ignored_signals():
            return await process.wait()
    finally:
        if process.returncode is None:  # the chat ends while the editor runs
            await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Terminate the editor, and kill it if it has not ended after _ENDING_SECONDS."""
    process.terminate()
    clock = asyncio.get_running_loop().time
    until = clock() + _ENDING_SECONDS
    while process.returncode is None and clock() < until:
        # asyncio.run cancels this task again after Textual did
        with suppress(TimeoutError, asyncio.CancelledError):
            await asyncio.wait_for(process.wait(), until - clock())
    if process.returncode is None:
        process.kill()
        await process.wait()


@contextmanager
def _ignored_signals() -> Iterator[None]:
    """Ignore Ctrl+C and Ctrl+\\ in this process while a child owns the terminal, as system(3) does."""
    names = [name for name in ("SIGINT", "SIGQUIT") if name in signal.Signals.__members__]
    before = {name: signal.signal(signal.Signals[name], signal.SIG_IGN) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(signal.Signals[name], handler)
