"""A text file becomes an attachment, if it is one. Reads files; knows no widget."""

from pathlib import Path

from tui.client import ClientError
from tui.nouns import Attachment

LARGEST = 2_000_000  # bytes; more than any context of today holds


def attachment(path: Path) -> Attachment:
    """The file at `path`. Raises ClientError where it is no text, or too large, or cannot be read."""
    try:
        with path.expanduser().open("rb") as file:
            data = file.read(LARGEST + 1)
    except OSError as error:
        raise ClientError(f"{path} cannot be read: {error.strerror}.", "Check the path.") from error
    if len(data) > LARGEST:
        raise ClientError(f"{path.name} has more than {LARGEST:,} bytes.", "Attach the part that matters.")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ClientError(f"{path.name} is no text in UTF-8.", "Only text files can be attached.") from error
    if "\0" in text:
        raise ClientError(f"{path.name} is a binary file.", "Only text files can be attached.")
    return Attachment(path.name, text)


def dropped_path(pasted: str) -> Path | None:
    """The file whose path was pasted, as terminals do it when one is dropped; None for any other text."""
    candidate = pasted.strip().strip("'\"").replace("\\ ", " ").removeprefix("file://")
    if "\n" in candidate or not candidate.startswith(("/", "~")) or len(candidate) > 4096:
        return None
    path = Path(candidate).expanduser()
    try:
        return path if path.is_file() else None
    except OSError:
        return None
