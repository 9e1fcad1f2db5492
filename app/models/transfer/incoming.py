"""A file that is being received: bounded and hashed while it arrives, and moved to its path only if it is verified."""

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from app.errors import IntegrityError, NoSpace
from app.progress import format_bytes
from app.whole_file import PARTIAL, put_in_place

_CHUNK = 1 << 20
_SYNC_BYTES = 64 << 20  # a download can lose at most this number of bytes in a power cut
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class Incoming:
    """Receives the bytes of a source. The file and its folder are created with the first byte."""

    def __init__(self, final: Path, size: int, digest: str) -> None:
        self.size = size
        self.received = 0
        self._unsynced = 0  # bytes that the system may not have written to disk yet
        self._partial = _partial(final)
        self._scratch = final.with_name(f"{final.name}.scratch")
        self._file: BinaryIO | None = None
        self.digest = digest  # expected digest in hex
        self._hash = hasher(digest, size)

    def scratch(self) -> Path:
        """Return a new folder for working files of the source. It is removed when the file is complete."""
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._scratch.mkdir(parents=True)
        return self._scratch

    def resume(self, report: Callable[[], None]) -> None:
        """Continue with the bytes of an interrupted download.

        They are read again; `report` is called after each piece.
        """
        if not 0 < _size(self._partial) <= self.size:
            return
        self._file = self._partial.open("r+b")
        while chunk := self._file.read(_CHUNK):
            self._hash.update(chunk)
            self.received += len(chunk)
            report()

    def restart(self) -> None:
        """Discard all received bytes."""
        self.received = 0
        self._hash = hasher(self.digest, self.size)
        if self._file is not None:
            self._file.seek(0)
            self._file.truncate()

    def write(self, chunk: bytes) -> None:
        """Write the next bytes. Raises IntegrityError if there are more than expected."""
        self.received += len(chunk)
        if self.received > self.size:
            raise IntegrityError(f"more than the expected {self.size} bytes arrived")
        if self._file is None:
            self._partial.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._partial.open("wb")
        self._hash.update(chunk)
        self._file.write(chunk)
        self._unsynced += len(chunk)
        if self._unsynced >= _SYNC_BYTES:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._unsynced = 0

    def verify(self) -> None:
        """Raise IntegrityError unless all expected bytes, with the expected digest, have arrived."""
        if self.received != self.size:
            raise IntegrityError(f"{self.received} bytes arrived instead of {self.size}")
        if self._hash.hexdigest() != self.digest:
            kind = self._hash.name
            raise IntegrityError(f"the file has {kind} {self._hash.hexdigest()} instead of {self.digest}")

    def move_to(self, final: Path) -> None:
        """Move the file to its final path. Raises IntegrityError unless exactly the expected bytes have arrived."""
        self.verify()
        if self._file is None:
            raise IntegrityError("nothing arrived")
        put_in_place(self._file, self._partial, final)

    def clear(self, *, keep: bool = False) -> None:
        """Remove temporary files. With `keep`, keep the bytes that have arrived."""
        if self._file is not None:
            with suppress(OSError):  # a full disk can refuse buffered data
                self._file.close()
        if not keep:
            self._partial.unlink(missing_ok=True)
        shutil.rmtree(self._scratch, ignore_errors=True)


@contextmanager
def receive(final: Path, size: int, digest: str, *, resumable: bool = False) -> Iterator[Incoming]:
    """Store the bytes that the body writes at `final`, once they are complete, verified, and synced to disk.

    `digest` in hex is the sha256, or git's sha1 of a blob with these bytes, which the Hub lists for small files.
    Incomplete bytes are in a `.partial` file beside `final`, so only one process at a time may receive the same file.
    An error leaves no new file. If `resumable`, the bytes that have arrived are kept for the next attempt, unless they
    are wrong or the disk is full.
    """
    incoming = Incoming(final, size, digest)
    keep = resumable
    try:
        yield incoming
        incoming.move_to(final)
    except IntegrityError:
        keep = False
        raise
    except OSError as problem:
        if problem.errno in _DISK_FULL:
            keep = False
            raise no_space(_nearest(final.parent), size) from problem
        raise
    finally:
        incoming.clear(keep=keep)


def arrived(final: Path) -> int:
    """Return the number of bytes of a file that an interrupted download has left."""
    return _size(_partial(final))


def discard(final: Path) -> None:
    """Remove the partial file of an interrupted download."""
    _partial(final).unlink(missing_ok=True)


def _size(partial: Path) -> int:
    return partial.stat().st_size if partial.is_file() else 0


def _partial(final: Path) -> Path:
    return final.with_name(f"{final.name}{PARTIAL}")


def hasher(digest: str, size: int) -> "hashlib._Hash":
    """Return the hash object for digests of this length: sha256, or git's sha1 of a blob of `size` bytes."""
    if len(digest) == hashlib.sha256().digest_size * 2:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)


def check_space(folder: Path, needed: int) -> None:
    """Raise NoSpace unless the disk of `folder`, which need not exist yet, has `needed` bytes free."""
    if free_space(folder) < needed:
        raise no_space(_nearest(folder), needed)


def free_space(folder: Path) -> int:
    """Return the free space in bytes on the disk of `folder`, which need not exist yet."""
    return shutil.disk_usage(_nearest(folder)).free


def no_space(folder: Path, needed: int) -> NoSpace:
    """Return the error that states how much space is needed, how much is free, and in which folder."""
    free = shutil.disk_usage(folder).free
    return NoSpace(
        f"{folder} has {format_bytes(free)} free, but {format_bytes(needed)} is needed",
        "Free some space, or choose folders on another disk with INGLE_MODELS_DIR and HF_HUB_CACHE.",
    )


def _nearest(folder: Path) -> Path:
    """Return `folder`, or its nearest parent that exists."""
    return next(path for path in (folder, *folder.parents) if path.exists())
