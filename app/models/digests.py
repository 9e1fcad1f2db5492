"""SHA-256 digests of model files, and one digest for a model of several files.

The digest of a file is computed once, or known from its download. It is stored in a small record for each path, which
is valid until the file changes.
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

DIGESTS = ".digests"  # folder of the records, in the models folder
_CHUNK = 1 << 20
_SHA256_LENGTH = 64


def digest_of(paths: Sequence[Path], records: Path, progress: Progress) -> str:
    """Return one hex digest for the names and contents of several files; for one file, its sha256. Raises OSError."""
    digests = [remembered_sha256(path, records, progress) for path in paths]
    if len(digests) == 1:
        return digests[0]
    lines = sorted(f"{path.name} {digest}\n" for path, digest in zip(paths, digests, strict=True))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def remembered_sha256(path: Path, records: Path, progress: Progress) -> str:
    """Return the hex digest of a file from its record in the folder `records`, or compute and record it.

    Raises OSError if the file cannot be read. If the record cannot be written, prints a line and continues.
    """
    path = path.absolute()
    identity = _identity(path)
    if digest := _recorded(_record_of(path, records), identity):
        return digest
    digest = sha256_of(path, f"Hashing {path.name}, once", progress)
    if _identity(path) != identity:
        return digest  # the file is being written to, so a record would be wrong
    try:
        remember_sha256(path, records, digest)
    except OSError as problem:
        progress.say(
            f"The digest of {path.name} cannot be saved in {records} ({problem.strerror}), so the file is read at "
            "every start."
        )
    return digest


def has_digest(path: Path, digest: str, records: Path, progress: Progress) -> bool:
    """Whether a file has a hex digest: a sha256, which is recorded, or git's sha1 of a small file.

    Raises OSError if the file cannot be read.
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
    """Return the hex digest of a file. `label` is shown as its progress. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file, progress.task(label, path.stat().st_size) as report:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            report(file.tell())
    return digest.hexdigest()


def _recorded(record: Path, identity: list[int]) -> str:
    """Return the recorded digest; empty if there is no record of exactly this file."""
    try:
        content = json.loads(record.read_bytes())
        digest = content["sha256"] if content["identity"] == identity else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return digest if isinstance(digest, str) else ""


def _identity(path: Path) -> list[int]:
    """Return values that change when a file is replaced or written to.

    The device is included, although some systems change it at each boot: a wrong match could not be detected here, and
    hashing the file again costs only seconds.
    """
    status = os.stat(path)
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns]
