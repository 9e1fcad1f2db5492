"""Files that readers see whole or not at all, also after a power cut."""

import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

PARTIAL = ".partial"  # how the names of files end that are not whole yet


def write_whole(final: Path, content: bytes, mode: int | None = None) -> None:
    """Replace a small file, so that a reader or a power cut sees the old content or the new, never a part.

    `mode`: its permissions; None: those that new files have.
    """
    partial = final.with_name(f"{final.name}.{os.getpid()}{PARTIAL}")
    permissions = 0o666 if mode is None else mode
    try:
        partial.unlink(missing_ok=True)  # a process that had this number may have left it, with other permissions
        with open(partial, "xb", opener=lambda path, flags: os.open(path, flags, permissions)) as file:
            if mode is not None:
                os.chmod(partial, mode)  # also those that the umask took away
            file.write(content)
            put_in_place(file, partial, final)
    finally:
        partial.unlink(missing_ok=True)  # it is there if the disk is full


def put_in_place(file: BinaryIO, partial: Path, final: Path) -> None:
    """Give a finished file its final name, in an order that a power cut cannot turn into a name without content."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
    os.replace(partial, final)
    with suppress(PermissionError):  # Windows cannot open a folder, and needs not: its renames are journaled
        folder = os.open(final.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
