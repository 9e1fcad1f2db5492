"""Renders a model's chat template over a conversation, in a child process with limits and a deadline.

A chat template is a program from a model file, so it is untrusted. It runs in a sandbox within the child process (see
template_child.py). The child's answers are JSON of limited size.
"""

import contextlib
import hashlib
import json
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import IO, Self, cast

from app.errors import TemplateError, TemplateUnavailable
from app.generation.conversation import Json, Message
from app.process.limited_process import library_folders, start_isolated

MAX_TEMPLATE_BYTES = 64 << 10  # 4 times the largest template in common use
MAX_TEXT_CHARS = 4 << 20  # about a million tokens of English, more than the context length of any supported model
MAX_FRAME_BYTES = 16 << 20  # size of MAX_TEXT_CHARS characters of 4 bytes each
# limit of the address space; the child starts with 25 MiB, and the largest conversation takes 100 MiB
MEMORY_BYTES = 256 << 20
DEADLINE_SECONDS = 1.0
# time limit for loading Python and jinja2, perhaps from a slow disk; no template runs in that time
_START_SECONDS = 60.0
_DETAIL_CHARS = 500

_PROGRAM = Path(__file__).with_name("template_child.py")
_LENGTH = struct.Struct(">I")

_OTHER_FILE = "Try another file of this model, or another model."
_SHORTEN = (
    "Shorten the conversation or the tools; if a short conversation fails as well, try another file of this model."
)
_RETRY = "Try again; if it fails again, try another file of this model."

# keys: kinds of failure as the child reports them; values: what happened, and what to do
_FAILURES: Mapping[str, tuple[str, str]] = {
    "syntax": ("The chat template has a syntax error", _OTHER_FILE),
    "raised": ("The chat template refused this conversation", "Change the messages or tools as the detail says."),
    "security": ("The chat template used an operation that is not allowed", _OTHER_FILE),
    "undefined": ("The chat template uses an undefined name", _OTHER_FILE),
    "memory": ("The chat template needs more memory than its limit", _SHORTEN),
    "costly": ("The chat template exceeds its limits", _SHORTEN),
    "failed": ("The chat template failed", _OTHER_FILE),
}


class ChatTemplateRenderer:
    """Renders chat templates, one at a time, from any thread.

    The child process starts with `start()` or the first render, and again after it had to be killed. `close()` ends it.
    `clock` returns the time for a template's `strftime_now`. `program` is the file that the child runs.
    """

    def __init__(
        self,
        *,
        seconds: float = DEADLINE_SECONDS,
        clock: Callable[[], datetime] = datetime.now,
        program: Path = _PROGRAM,
    ) -> None:
        self._seconds = seconds
        self._clock = clock
        self._program = program
        self._lock = threading.Lock()
        self._child: _Child | None = None

    def now(self) -> datetime:
        """Return the local time, as `strftime_now` of templates uses it."""
        return self._clock()

    def start(self) -> None:
        """Start the child process and return at once, so that it starts in parallel with other work."""
        with self._lock:
            self._running_child()

    def render(
        self,
        template: str,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Json]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Json] | None = None,
        arguments_as_text: bool = False,
    ) -> str:
        """Return the prompt that `template` renders for `messages`.

        `tools` are in OpenAI's form. `variables` are the template's other inputs (bos_token, enable_thinking, ...).
        `arguments_as_text` passes the arguments of calls as JSON text. Raises TemplateError if the template fails,
        refuses the conversation, or exceeds its limits.
        """
        source = _checked_source(template)
        context: dict[str, Json] = {
            "messages": [message.to_template(arguments_as_text=arguments_as_text) for message in messages],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        if taken := context.keys() & (variables or {}).keys():
            raise TemplateError(
                f"The template variable {min(taken)!r} cannot be set: its value comes from the conversation.",
                "Remove it.",
            )
        request: dict[str, object] = {
            "template": hashlib.sha256(source).hexdigest(),
            "now": self._clock().isoformat(),
            "context": context | dict(variables or {}),
        }
        return _text(self._reply(request, template))

    def close(self) -> None:
        """End the child process. A later render starts another."""
        with self._lock:
            self._drop_child()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _reply(self, request: dict[str, object], source: str) -> dict[str, object]:
        frame = _encoded(request)
        with self._lock:
            child = self._running_child()
            child.wait_ready()
            with child.killed_after(self._seconds, "Rendering the chat template"):
                reply = child.ask(frame)
                if reply == {"unknown": True}:  # the source is sent once per child process
                    reply = child.ask(_encoded(request | {"source": source}))
            if reply.get("error") == "memory":
                self._drop_child()  # the child's cache of compiled templates may be what fills its memory
            return reply

    def _running_child(self) -> "_Child":
        if self._child is None or not self._child.alive():
            self._drop_child()
            self._child = _Child(self._program, self._seconds)
        return self._child

    def _drop_child(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None


class _BrokenChild(Exception):
    """The child process ended, or sent an answer that is invalid."""


class _Child:
    """A child process, with which frames are exchanged. It is killed after any failure."""

    def __init__(self, program: Path, seconds: float) -> None:
        limits = {
            "memory_bytes": MEMORY_BYTES,
            "frame_bytes": MAX_FRAME_BYTES,
            "text_chars": MAX_TEXT_CHARS,
            "seconds": seconds + 1,
        }
        try:
            self._process = start_isolated(program, limits, library_folders("jinja2", "markupsafe"))
        except OSError as error:
            raise TemplateUnavailable(
                f"The process that renders chat templates cannot start: {error}", _RETRY
            ) from error
        self._stdin, self._stdout = cast(IO[bytes], self._process.stdin), cast(IO[bytes], self._process.stdout)
        self._ready = False

    def alive(self) -> bool:
        """Whether the process is running."""
        return self._process.poll() is None

    def kill(self) -> None:
        """End the process and release its pipes."""
        self._process.kill()
        with self._process:
            pass

    @contextlib.contextmanager
    def killed_after(self, seconds: float, what: str) -> Iterator[None]:
        """Kill the child process if the body takes longer than `seconds` or raises.

        `what` describes the work in the error message.
        """
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            self._process.kill()

        timer = threading.Timer(seconds, expire)
        timer.start()
        broken = None
        try:
            yield
        except _BrokenChild as error:
            broken = error
        except BaseException:
            self.kill()  # Otherwise a late answer could reach the next render.
            raise
        finally:
            timer.cancel()
            timer.join()
        if expired.is_set() or broken:
            self.kill()
            problem = f"took longer than {seconds:g} s" if expired.is_set() else f"failed: {broken}"
            raise TemplateUnavailable(f"{what} {problem}.", _RETRY) from broken

    def wait_ready(self) -> None:
        """Wait until the child process has started. The wait does not count toward the deadline of a render."""
        if not self._ready:
            with self.killed_after(_START_SECONDS, "Starting the process that renders chat templates"):
                if self._receive() != {"ready": True}:
                    raise _BrokenChild("it is not the expected program")
            self._ready = True

    def ask(self, frame: bytes) -> dict[str, object]:
        """Send a frame to the child, and return its answer."""
        unsent = memoryview(_LENGTH.pack(len(frame)) + frame)
        try:
            while unsent:
                unsent = unsent[self._stdin.write(unsent) :]
        except OSError as error:
            raise _BrokenChild("the process ended") from error
        return self._receive()

    def _receive(self) -> dict[str, object]:
        (size,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if size > MAX_FRAME_BYTES:
            raise _BrokenChild("its answer is too large")
        try:
            reply = json.loads(self._read(size))
        except (ValueError, RecursionError) as error:
            raise _BrokenChild("its answer cannot be read") from error
        if not isinstance(reply, dict):
            raise _BrokenChild("its answer cannot be read")
        return reply

    def _read(self, size: int) -> bytes:
        read = bytearray()
        while len(read) < size:
            part = self._stdout.read(size - len(read))
            if not part:
                raise _BrokenChild("the process ended")
            read += part
        return bytes(read)


def _checked_source(template: str) -> bytes:
    """Return the template as bytes. A model file may hold a value of any type and size as its template."""
    if not isinstance(template, str):
        raise TemplateError(f"The chat template is not text but {type(template).__name__}.", _OTHER_FILE)
    try:
        source = template.encode()
    except UnicodeEncodeError as error:
        raise TemplateError(f"The chat template is not valid text: {error}", _OTHER_FILE) from error
    if len(source) > MAX_TEMPLATE_BYTES:
        raise TemplateError(
            f"The chat template has {len(source):,} bytes; the limit is {MAX_TEMPLATE_BYTES:,}.", _OTHER_FILE
        )
    return source


def check_characters(messages: Sequence[Message]) -> None:
    """Raise TemplateError if a conversation is longer than any text that may be rendered.

    Checked first, because other work on such a conversation takes long.
    """
    characters = sum(len(message.content) + len(message.reasoning or "") for message in messages)
    if characters > MAX_TEXT_CHARS:
        raise TemplateError(
            f"The conversation has {characters:,} characters; the limit is {MAX_TEXT_CHARS:,}.", _SHORTEN
        )


def _encoded(request: Mapping[str, object]) -> bytes:
    try:
        frame = json.dumps(request, ensure_ascii=False, default=_as_json).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise TemplateError(f"The conversation cannot be passed to a chat template: {error}", _SHORTEN) from error
    if len(frame) > MAX_FRAME_BYTES:
        raise TemplateError(f"The conversation has {len(frame):,} bytes; the limit is {MAX_FRAME_BYTES:,}.", _SHORTEN)
    return frame


def _as_json(value: object) -> dict[object, object]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a value of type {type(value).__name__} is not JSON")


def _text(reply: Mapping[str, object]) -> str:
    match reply:
        case {"text": str(text)}:
            return text
        case {"error": str(kind), "detail": str(detail), "line": int() | None as line} if kind in _FAILURES:
            what, remedy = _FAILURES[kind]
            where = "" if line is None else f" (line {line})"
            # The detail may come from the template. It must not contain terminal control characters.
            shown = "".join(c if c.isprintable() else " " for c in detail[:_DETAIL_CHARS])
            raise TemplateError(f"{what}{where}: {shown}" if shown else f"{what}{where}.", remedy)
        case _:
            raise TemplateUnavailable("The process that renders chat templates returned an invalid answer.", _RETRY)
