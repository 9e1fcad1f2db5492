"""Reads lines of input from a pipe, or from a terminal with the editing, history, and completion of readline."""

import asyncio
import importlib.util
import io
import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

INTERRUPTED = "\x03"  # marks a line that the user abandoned with Ctrl-C

_BINDINGS = (  # key bindings for GNU readline
    "tab: complete",
    "set completion-query-items 0",
    "set page-completions off",
    r'"\C-c": "\C-v\C-c\C-m"',  # inserts Ctrl-C as a character, shown as ^C, and ends the line
    r'"\e\C-m": "\C-v\C-j"',  # Alt+Enter inserts a line break
)
# bracketed paste, which readline turns on while a line is typed; on during a reply as well, so that lines pasted
# meanwhile are one message
_PASTE_MODE, _NO_PASTE_MODE = "\x1b[?2004h", "\x1b[?2004l"

# takes the typed line, returns complete lines, and is called on another thread
Completer = Callable[[str], Sequence[str]]


class InputLines(Protocol):
    """A source of lines."""

    async def next(self, prompt: str) -> str | None:
        """Return the next line, or None if the input has ended."""

    def shown(self) -> str:
        """Return the prompt and the text being typed. After a message was printed, they are written again below it."""

    def discard(self) -> None:
        """Discard what the user typed before a question, so that it is not taken as the answer."""

    def close(self) -> None:
        """Restore the terminal."""


class PlainLines:
    """Reads lines from a pipe, or from a terminal without readline."""

    def __init__(self, write: Callable[[str], None], fail: Callable[[str], None]) -> None:
        """Start to read stdin. `write` writes a prompt. `fail` reports an error that ends the input."""
        self._write = write
        self._fail = fail
        self._lines: asyncio.Queue[str | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, args=(loop,), name="input", daemon=True).start()

    async def next(self, prompt: str) -> str | None:
        self._write(prompt)
        line = await self._lines.get()
        if line is None:
            self._lines.put_nowait(None)
        return line

    def shown(self) -> str:
        return ""

    def discard(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read stdin on a daemon thread. At the end, also after an error, put None into the queue."""
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")
        with suppress(RuntimeError):  # the event loop is closed
            try:
                for line in sys.stdin or ():
                    loop.call_soon_threadsafe(self._lines.put_nowait, line)
            except (ValueError, OSError) as problem:  # stdin is closed
                loop.call_soon_threadsafe(self._fail, f"error: end of input: {problem}")
            finally:
                loop.call_soon_threadsafe(self._lines.put_nowait, None)


def can_edit() -> bool:
    """Whether stdin and stdout are a terminal, and readline is installed."""
    if importlib.util.find_spec("readline") is None:  # Windows, whose console edits lines itself
        return False
    try:
        return os.isatty(sys.stdin.fileno()) and os.isatty(sys.stdout.fileno())
    except (OSError, ValueError, AttributeError):  # a stream is closed, or replaced by an object without a descriptor
        return False


class EditedLines:
    """Reads lines typed at a terminal. Keys typed between two lines are not echoed, and go into the next line."""

    def __init__(self, complete: Completer, *, has_modes: bool) -> None:
        """Set up the terminal and readline. `has_modes`: whether the terminal understands escape sequences."""
        import termios

        self._terminal = sys.stdin.fileno()
        self._before = termios.tcgetattr(self._terminal)
        self._has_modes = has_modes
        self._prompt: str | None = None  # prompt of the line that is being read
        self._prompts: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._lines: asyncio.Queue[str | None] = asyncio.Queue()
        self._complete = complete
        self._found: Sequence[str] = ()
        self._has_interrupt_key = self._set_up()
        self._be_quiet()
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, args=(loop,), name="input", daemon=True).start()

    async def next(self, prompt: str) -> str | None:
        if self._prompt is None:  # if it is set, the previous call was cancelled, and its line is still being read
            self._prompt = prompt
            self._prompts.put(prompt)
        line = await self._lines.get()
        self._prompt = None
        return line

    def shown(self) -> str:
        import readline

        return "" if self._prompt is None else self._prompt + readline.get_line_buffer()

    def discard(self) -> None:
        import termios

        with suppress(termios.error):
            termios.tcflush(self._terminal, termios.TCIFLUSH)

    def close(self) -> None:
        import termios

        sys.stdout.write(_NO_PASTE_MODE * self._has_modes + "\n" * (self._prompt is not None))
        sys.stdout.flush()
        with suppress(termios.error):  # raised if the terminal is closed
            termios.tcsetattr(self._terminal, termios.TCSADRAIN, self._before)

    def _set_up(self) -> bool:
        """Set up readline. Returns whether readline handles Ctrl-C as a key; otherwise Ctrl-C sends SIGINT."""
        import readline

        readline.set_auto_history(False)
        readline.set_completer_delims("")  # complete the whole line instead of its last word
        readline.set_completer(self._candidate)
        if "libedit" in (readline.__doc__ or ""):
            readline.parse_and_bind("bind ^I rl_complete")
            return False
        for keymap in ("emacs", "vi-insert"):
            readline.parse_and_bind(f"set keymap {keymap}")
            for binding in _BINDINGS:
                readline.parse_and_bind(binding)
        readline.parse_and_bind("set editing-mode emacs")
        with suppress(OSError):  # no inputrc
            readline.read_init_file()  # may choose another editing mode
        if self._has_modes:
            readline.parse_and_bind("set enable-bracketed-paste on")  # read_init_file() turns it off
        return True

    def _candidate(self, line: str, number: int) -> str | None:
        if number == 0:
            self._found = self._complete(line)
        return self._found[number] if number < len(self._found) else None

    def _be_quiet(self) -> None:
        """Turn echo off while a reply is printed, and let Ctrl-C send SIGINT without discarding what was typed."""
        import termios

        self._change(self._before[3] & ~termios.ECHO | termios.NOFLSH, self._before[6])
        if self._has_modes and self._has_interrupt_key:  # libedit does not read the marks
            sys.stdout.write(_PASTE_MODE)
            sys.stdout.flush()

    def _be_editable(self) -> None:
        import termios

        keys = list(self._before[6])
        if self._has_interrupt_key:
            keys[termios.VINTR] = b"\0"
        self._change(self._before[3], keys)

    def _change(self, local_modes: int, keys: list[bytes | int]) -> None:
        import termios

        with suppress(termios.error):  # raised if the terminal is closed
            changed = termios.tcgetattr(self._terminal)
            changed[3], changed[6] = local_modes, keys
            termios.tcsetattr(self._terminal, termios.TCSADRAIN, changed)

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read one line for each prompt. Runs on a daemon thread."""
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")
        with suppress(RuntimeError):  # the event loop is closed
            while True:
                prompt = self._prompts.get()
                self._be_editable()
                try:
                    line: str | None = input(prompt)
                except (EOFError, OSError, ValueError):
                    line = None
                self._be_quiet()
                loop.call_soon_threadsafe(self._lines.put_nowait, line)


def remember(line: str) -> None:
    """Add a line to the history of readline."""
    import readline

    last = readline.get_current_history_length()
    if line and (not last or readline.get_history_item(last) != line):
        readline.add_history(line)
