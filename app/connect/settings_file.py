"""Read, parse, and replace settings files of other programs. Links stay, and permissions are kept."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

from app.connect.documents import Document, Format, InvalidFile, InvalidText, WholeText
from app.whole_file import write_whole
from engine.private_folder import private_folder

_PRIVATE = 0o600
_MOST_BYTES = 16 << 20


def read_file(path: Path) -> bytes | None:
    """Return the content of a file; None: it does not exist.

    Raises InvalidFile for a file that `write_file` may not replace.
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise InvalidFile(f"{path}: this is not a regular file", "Move it to another folder.")
        if not found.st_mode & stat.S_IWUSR:
            raise InvalidFile(f"{path}: the file is read-only", "Allow writing to it, or set the client up by hand.")
        if os.name != "nt" and found.st_uid != os.geteuid():
            raise InvalidFile(f"{path}: the file belongs to another user", "Run the command as that user.")
        if found.st_size > _MOST_BYTES:
            raise InvalidFile(f"{path}: the file is larger than {_MOST_BYTES >> 20} MiB", "Set the client up by hand.")
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as problem:
        raise InvalidFile(f"{path}: {problem.strerror}", "Set the client up by hand.") from None


def check_private(path: Path) -> None:
    """Raise InvalidFile if other users can read a file that is to contain a key."""
    if os.name != "nt" and path.exists() and path.stat().st_mode & 0o077:
        raise InvalidFile(f"{path}: other users can read this file, and a key is written to it", f"chmod 600 {path}")


def write_file(path: Path, content: bytes) -> None:
    """Replace a file, or create it for this user only. If it is a symbolic link, replace its target. Raises OSError."""
    target = Path(os.path.realpath(path))
    private_folder(target.parent)
    mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else _PRIVATE
    write_whole(target, content, mode)


def remove_file(path: Path) -> None:
    """Remove a file that `write_file` created. If it is a symbolic link, remove its target. Raises OSError."""
    Path(os.path.realpath(path)).unlink(missing_ok=True)


def opened(path: Path, form: Format, content: bytes | None) -> Document:
    """Return the document of a file. Raises InvalidFile, with the position of the error."""
    remedy = "Correct the file, then run the command again."
    try:
        text = (content or b"").decode()
    except UnicodeDecodeError as problem:
        raise InvalidFile(f"{path}: not UTF-8 text at byte {problem.start:,}", remedy) from None
    try:
        return _document_class(form)(text)
    except InvalidText as problem:
        line = text.count("\n", 0, problem.index) + 1
        column = problem.index - text.rfind("\n", 0, problem.index)
        raise InvalidFile(f"{path}, line {line}, column {column}: {problem}", remedy) from None


def _document_class(form: Format) -> Callable[[str], Document]:
    if form == "json":
        from app.connect.json_with_comments import JsonWithComments

        return JsonWithComments
    if form == "yaml":
        from app.connect.yaml_document import YamlDocument

        return YamlDocument
    return WholeText
