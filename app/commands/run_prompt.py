"""The prompt of `ingle run`: its argument, stdin, and the previous exchange that --continue resumes."""

import os
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from app.errors import AppError
from app.settings.settings import Settings
from app.whole_file import write_whole
from engine.private_folder import private_folder

if TYPE_CHECKING:
    from app.generation.conversation import Message

_FILE = "last-run.json"  # file in the state folder that only its owner can read
_PRIVATE = 0o600


class NoPreviousRun(AppError):
    """No previous exchange can be continued."""


def read_question(argument: str | None) -> str:
    """Return the question: `argument`, or stdin if it is missing or "-". Text that is piped in is appended to an
    argument.

    Raises click.UsageError if there is no question.
    """
    if argument is None and sys.stdin.isatty():
        raise click.UsageError("There is no prompt. Give one, or - to read it from stdin.")
    parts = [] if argument in (None, "-") else [str(argument)]
    if not parts or _is_piped():
        parts.append(sys.stdin.buffer.read().decode("utf-8", errors="replace").rstrip("\n"))
    question = "\n\n".join(part for part in parts if part.strip())
    if not question:
        raise click.UsageError("The prompt is empty.")
    return question


def _is_piped() -> bool:
    """Whether stdin is a pipe or a file. A terminal and /dev/null have no text to add to a prompt."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):  # stdin is closed, or is an object without a descriptor
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


class _StoredMessage(msgspec.Struct):
    role: str
    content: str


class _StoredRun(msgspec.Struct):
    model: str  # as the user named it, or an absolute path
    messages: list[_StoredMessage]


def previous_run(state_folder: Path) -> "tuple[str, list[Message]]":
    """Return the model and the messages, oldest first, of the previous `ingle run`. Raises NoPreviousRun."""
    from app.generation.conversation import Message

    try:
        stored = msgspec.json.decode((state_folder / _FILE).read_bytes(), type=_StoredRun)
    except (OSError, ValueError) as problem:  # msgspec's errors are ValueErrors
        raise NoPreviousRun("There is no previous answer to continue", "Run ingle run without --continue.") from problem
    return stored.model, [Message(message.role, message.content) for message in stored.messages]


def save_run(settings: Settings, messages: "list[Message]", answer: str) -> None:
    """Store an exchange and its model for --continue. It replaces the previous one. Raises OSError."""
    from app.models.store import ModelStore

    stored = [*(_StoredMessage(message.role, message.content) for message in messages)]
    run = _StoredRun(ModelStore(settings).lasting_name(settings.model), [*stored, _StoredMessage("assistant", answer)])
    write_whole(private_folder(settings.state_dir) / _FILE, msgspec.json.encode(run), _PRIVATE)
