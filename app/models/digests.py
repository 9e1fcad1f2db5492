"""Which weights a file holds: the sha256 of all its bytes, for files that nobody has promised anything about.

It is computed once and remembered, in a small record of its own for each path, for as long as the file is the same one.
Refuses to know what is in the file.
"""

import hashlib
import json
import os
from pathlib import Path

from app.config import private_folder
from app.models.incoming import write_whole
from app.progress import Progress

_CHUNK = 1 << 20


def remembered_sha256(path: Path, records: Path, progress: Progress) -> str:
    """The digest of a file, in hex: from its record in the folder `records`, else computed and recorded there.

    Raises OSError where the file cannot be read. Where the record cannot be written, says so, and goes on.
    """
    path = path.absolute()
    record = records / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.json"
    identity = _identity(path)
    if digest := _recorded(record, identity):
        return digest
    digest = sha256_of(path, f"Reading {path.name} once, to know it again", progress)
    if _identity(path) != identity:
        return digest  # it is being written to: the next time it is another one
    try:
        private_folder(records)
        write_whole(record, json.dumps({"path": str(path), "identity": identity, "sha256": digest}, indent=2).encode())
    except OSError as problem:
        progress.say(
            f"{path.name} will be read at every start, since its digest cannot be kept in {records}: {problem.strerror}"
        )
    return digest


def sha256_of(path: Path, label: str, progress: Progress) -> str:
    """The digest of a file, in hex, computed under a label for people. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file, progress.task(label, path.stat().st_size) as report:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            report(file.tell())
    return digest.hexdigest()


def _recorded(record: Path, identity: list[int]) -> str:
    """Empty where there is no record of exactly this file."""
    try:
        content = json.loads(record.read_bytes())
        digest = content["sha256"] if content["identity"] == identity else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return digest if isinstance(digest, str) else ""


def _identity(path: Path) -> list[int]:
    """What changes when a file is replaced or written to. The device is part of it, though on some systems it differs
    from boot to boot: there is no promised digest to tell a mistake by, and to hash again costs seconds."""
    status = os.stat(path)
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns]
