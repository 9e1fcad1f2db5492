"""Writes files atomically: a reader sees the old file or the new one, never a part, even after a power cut."""

import os
from collections.abc import Iterable
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from app.errors import AppError

PARTIAL = ".partial"  # suffix of unfinished files


def write_whole(final: Path, content: bytes, mode: int | None = None) -> None:
    """Replace a small file. After a power cut it has the old content or the new, never a part.

    `mode`: permissions of the file; None: the default of new files.
    """
    partial = final.with_name(f"{final.name}.{os.getpid()}{PARTIAL}")
    permissions = 0o666 if mode is None else mode
    try:
        partial.unlink(missing_ok=True)  # an earlier process with this pid may have left it, with other permissions
        with open(partial, "xb", opener=lambda path, flags: os.open(path, flags, permissions)) as file:
            if mode is not None:
                os.chmod(partial, mode)  # adds permissions that the umask removed
            file.write(content)
            put_in_place(file, partial, final)
    finally:
        partial.unlink(missing_ok=True)  # the partial file still exists if writing failed, for example on a full disk


def write_new_zip(path: Path, files: Iterable[tuple[str, bytes]]) -> None:
    """Write files, each with its name, to a new zip file that only this user can read.

    Raises AppError if the file exists, and OSError.
    """
    import zipfile

    if path.exists():
        raise AppError(f"{path} exists already", "Choose another name.")
    content = BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files:
            archive.writestr(name, data)
    write_whole(path, content.getvalue(), 0o600)


def put_in_place(file: BinaryIO, partial: Path, final: Path) -> None:
    """Rename a finished file to its final name.

    The file is synced first, so that a power cut cannot leave an empty file under that name.
    """
    file.flush()
    os.fsync(file.fileno())
    file.close()
    os.replace(partial, final)
    with suppress(PermissionError):  # Windows cannot open a folder, and NTFS journals renames
        folder = os.open(final.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
