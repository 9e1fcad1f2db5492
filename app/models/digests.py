"""Which weights a file holds: the sha256 of all its bytes, and one digest for a model of several files.

That of a file is computed once, or known from its download, and remembered in a small record of its own for each path,
for as long as the file is the same one. Refuses to know what is in the file.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from app.models.transfer.incoming import hasher
from app.progress import Progress
from app.whole_file import write_whole
from engine.private_folder import private_folder

DIGESTS = ".digests"  # the folder of the records, in that of all models
_CHUNK = 1 << 20
_SHA256_LENGTH = 64


def digest_of(paths: Sequence[Path], records: Path, progress: Progress) -> str:
    """The digest, in hex, of what several files hold together, by name; of one file, its sha256. Raises OSError."""
    digests = [remembered_sha256(path, records, progress) for path in paths]
    if len(digests) == 1:
        return digests[0]
    lines = sorted(f"{path.name} {digest}\n" for path, digest in zip(paths, digests, strict=True))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def remembered_sha256(path: Path, records: Path, progress: Progress) -> str:
    """The digest of a file, in hex: from its record in the folder `records`, else computed and recorded there.

    Raises OSError where the file cannot be read. Where the record cannot be written, says so, and goes on.
    """
    path = path.absolute()
    identity = _identity(path)
    if digest := _recorded(_record_of(path, records), identity):
        return digest
    digest = sha256_of(path, f"Reading {path.name} once, to know it again", progress)
    if _identity(path) != identity:
        return digest  # it is being written to: the next time it is another one
    try:
        remember_sha256(path, records, digest)
    except OSError as problem:
        progress.say(
            f"{path.name} will be read at every start, since its digest cannot be kept in {records}: {problem.strerror}"
        )
    return digest


def has_digest(path: Path, digest: str, records: Path, progress: Progress) -> bool:
    """Whether a file has the bytes of a digest in hex: a sha256, which is remembered, or git's sha1 of a small file.

    Raises OSError where the file cannot be read.
    """
    if len(digest) == _SHA256_LENGTH:
        return remembered_sha256(path, records, progress) == digest
    content = path.read_bytes()
    found = hasher(digest, len(content))
    found.update(content)
    return found.hexdigest() == digest


def remember_sha256(path: Path, records: Path, digest: str) -> None:
    """Record the digest of a file as it is now. Raises OSError."""
    path = path.absolute()
    private_folder(records)
    record = {"path": str(path), "identity": _identity(path), "sha256": digest}
    write_whole(_record_of(path, records), json.dumps(record, indent=2).encode())


def _record_of(path: Path, records: Path) -> Path:
    return records / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.json"


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
