"""A file on its way in: bounded and hashed while it arrives, and placed whole and verified, or not at all.

It knows the promised size and digest, never where the bytes come from.
"""

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
_SAFE_AFTER = 64 << 20  # bytes, at most, that a power cut can take from a download
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class Incoming:
    """What a source writes into. The file, and its folder, come into being with the first byte."""

    def __init__(self, final: Path, size: int, digest: str) -> None:
        self.size = size
        self.received = 0
        self._unsafe = 0  # bytes that the system may not have written yet
        self._partial = _partial(final)
        self._scratch = final.with_name(f"{final.name}.scratch")
        self._file: BinaryIO | None = None
        self.digest = digest  # the promised one
        self._hash = hasher(digest, size)

    def scratch(self) -> Path:
        """A new folder for working files of the source; it is removed when the file has been taken in."""
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._scratch.mkdir(parents=True)
        return self._scratch

    def resume(self, tell: Callable[[], None]) -> None:
        """Let what an interrupted download has left be the first bytes; it is read, and each piece told of."""
        if not 0 < _size(self._partial) <= self.size:
            return
        self._file = self._partial.open("r+b")
        while chunk := self._file.read(_CHUNK):
            self._hash.update(chunk)
            self.received += len(chunk)
            tell()

    def restart(self) -> None:
        """Forget all bytes that were received."""
        self.received = 0
        self._hash = hasher(self.digest, self.size)
        if self._file is not None:
            self._file.seek(0)
            self._file.truncate()

    def write(self, chunk: bytes) -> None:
        """Take the next bytes. Raises IntegrityError as soon as there are more than promised."""
        self.received += len(chunk)
        if self.received > self.size:
            raise IntegrityError(f"more than the promised {self.size} bytes arrived")
        if self._file is None:
            self._partial.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._partial.open("wb")
        self._hash.update(chunk)
        self._file.write(chunk)
        self._unsafe += len(chunk)
        if self._unsafe >= _SAFE_AFTER:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._unsafe = 0

    def check(self) -> None:
        """Raise IntegrityError unless exactly the promised bytes have arrived."""
        if self.received != self.size:
            raise IntegrityError(f"{self.received} bytes arrived instead of {self.size}")
        if self._hash.hexdigest() != self.digest:
            kind = self._hash.name
            raise IntegrityError(f"the file has {kind} {self._hash.hexdigest()} instead of {self.digest}")

    def place(self, final: Path) -> None:
        """Move the file to its final name. Raises IntegrityError unless exactly the promised bytes have arrived."""
        self.check()
        if self._file is None:
            raise IntegrityError("nothing arrived")
        put_in_place(self._file, self._partial, final)

    def clear(self, *, keep: bool = False) -> None:
        """Remove everything that is not the final file; with `keep`, all but the bytes that have arrived."""
        if self._file is not None:
            with suppress(OSError):  # a full disk can refuse what is still buffered
                self._file.close()
        if not keep:
            self._partial.unlink(missing_ok=True)
        shutil.rmtree(self._scratch, ignore_errors=True)


@contextmanager
def receive(final: Path, size: int, digest: str, *, resumable: bool = False) -> Iterator[Incoming]:
    """Place at `final` what the body writes, once it is complete, verified and safe on the disk.

    `digest` in hex is the sha256, or the sha1 that git gives a blob of these bytes, as the Hub has it of small files.
    Until then the bytes are in a `.partial` file beside it, so only one process at a time may receive the same file.
    Whatever goes wrong, nothing new is left behind; but of a `resumable` one, what has arrived stays for the next time,
    unless the bytes are wrong or the disk is full.
    """
    incoming = Incoming(final, size, digest)
    keep = resumable
    try:
        yield incoming
        incoming.place(final)
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
    """How many bytes an interrupted download has left of a file."""
    return _size(_partial(final))


def discard(final: Path) -> None:
    """Remove what an interrupted download has left of a file."""
    _partial(final).unlink(missing_ok=True)


def _size(partial: Path) -> int:
    return partial.stat().st_size if partial.is_file() else 0


def _partial(final: Path) -> Path:
    return final.with_name(f"{final.name}{PARTIAL}")


def hasher(digest: str, size: int) -> "hashlib._Hash":
    """What makes a digest of this kind of `size` bytes: sha256, or the sha1 that git gives a blob."""
    if len(digest) == hashlib.sha256().digest_size * 2:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)


def check_space(folder: Path, needed: int) -> None:
    """Raise NoSpace unless the disk of `folder`, which need not exist yet, has `needed` bytes free."""
    if free_space(folder) < needed:
        raise no_space(_nearest(folder), needed)


def free_space(folder: Path) -> int:
    """Bytes that are free on the disk of `folder`, which need not exist yet."""
    return shutil.disk_usage(_nearest(folder)).free


def no_space(folder: Path, needed: int) -> NoSpace:
    """The error that says how much was needed, how much is left, and where."""
    free = shutil.disk_usage(folder).free
    return NoSpace(
        f"{folder} has {format_bytes(free)} free, and {format_bytes(needed)} are needed",
        "Free some space, or choose folders on another disk with INGLE_MODELS_DIR and HF_HUB_CACHE.",
    )


def _nearest(folder: Path) -> Path:
    """`folder` or the nearest parent of it that exists."""
    return next(place for place in (folder, *folder.parents) if place.exists())
