"""SQLite's write-ahead log: which frames SQLite applies, and whether frames were lost.

A log (https://sqlite.org/fileformat2.html#walformat) is a header and frames. A frame is a page that a transaction
changed, and the last frame of a transaction commits it. The checksums of frames form a chain: SQLite applies the frames
up to the last commit before the first wrong checksum, and silently drops the rest. A process that is killed during a
write also leaves frames that SQLite drops. The index of the log (the -shm file) distinguishes the two cases, because it
counts the frames of committed transactions.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from app.history.schema import PAGE_SIZE

_HEADER, _FRAME_HEADER = 32, 24
_FRAME = _FRAME_HEADER + PAGE_SIZE
_MAGIC, _VERSION = 0x377F0682, 3007000
_INDEX_HEADER = 48  # bytes of one of the two copies of the header

_FLIPS = 8  # a salt that differs in at most this number of bits counts as damaged, not as one of an older log

_Sums = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Frame:
    """One changed page."""

    index: int  # index of the frame in the file, starting at 1
    page: int  # page number, starting at 1
    is_commit: bool
    content: bytes
    is_sound: bool  # salt and checksum are right, given the previous frame


@dataclass(frozen=True, slots=True)
class Wal:
    """The frames since the log was last restarted, oldest first."""

    frames: Sequence[Frame] = ()
    applied: int = 0  # number of frames that SQLite applies
    is_damaged: bool = False  # SQLite would drop frames that were, or may have been, committed
    is_complete: bool = True  # no frame is known to be missing

    @property
    def damage(self) -> str:
        """The damage in a few words, or ""."""
        if not self.is_damaged:
            return ""
        is_last = self.frames and not any(frame.is_commit for frame in self.frames[self.applied : -1])
        last = "the last change in its log is damaged or incomplete"
        return last if is_last else "its log of recent changes is damaged"


def read_wal(content: bytes, shm: bytes = b"") -> Wal:
    """Parse a log file. `shm` is the content of its -shm file, if any."""
    if not content.strip(b"\0"):  # created but never written
        return Wal()
    has_header = _is_header(content)
    salt = content[16:24] if has_header else content[_HEADER + 8 : _HEADER + 16]
    frames = list(_frames(content, salt))
    if not has_header and not any(frame.is_sound for frame in frames):
        return Wal(is_damaged=True, is_complete=False)
    sound = list(takewhile(lambda frame: frame.is_sound, frames)) if has_header else []
    applied = max((frame.index for frame in sound if frame.is_commit), default=0)
    rest, is_cut, committed = frames[applied:], _is_cut(content, salt), _committed(shm, salt)
    is_damaged = not has_header or is_cut or len(sound) < len(frames)
    if committed is not None:
        is_damaged = committed > applied or (is_damaged and committed < applied)
    elif has_header and rest and not is_cut:
        is_damaged = is_damaged and not _is_unwritten(content, salt, rest, applied)
    is_complete = not is_cut and len(frames) == max(frames[-1].index if frames else 0, committed or 0)
    return Wal(frames, applied, is_damaged, is_complete)


def _is_unwritten(content: bytes, salt: bytes, rest: Sequence[Frame], applied: int) -> bool:
    """Whether frames are missing only because the machine stopped while SQLite wrote the last, uncommitted change.

    A committed change has no missing frames, because SQLite writes the next change only when a commit is on disk.
    """
    there = {frame.index for frame in rest}
    absent = (index for index in range(applied + 1, rest[-1].index) if index not in there)
    salts = (content[_start(index) + 8 : _start(index) + 16] for index in absent)
    is_single = not any(frame.is_commit for frame in rest[:-1])
    return is_single and any(_distance(found, salt) > _FLIPS for found in salts)


def _start(index: int) -> int:
    return _HEADER + (index - 1) * _FRAME


def _distance(one: bytes, other: bytes) -> int:
    """Return the number of bits in which two byte strings of equal length differ."""
    return (int.from_bytes(one, "big") ^ int.from_bytes(other, "big")).bit_count()


def _is_header(content: bytes) -> bool:
    if len(content) < _HEADER:
        return False
    magic, version, page_size = struct.unpack_from(">3I", content)
    sums = struct.unpack_from(">2I", content, 24)
    is_known = magic & ~1 == _MAGIC and version == _VERSION and page_size == PAGE_SIZE
    return is_known and sums == _sums(_order(content), content[:24], (0, 0))


def _order(content: bytes) -> str:
    """Return the byte order of the checksummed words."""
    return ">" if content.startswith((_MAGIC | 1).to_bytes(4, "big")) else "<"


def _frames(content: bytes, salt: bytes) -> Iterator[Frame]:
    """Yield the frames of the current log. Remains of an older log, which it overwrites, have another salt."""
    order = _order(content)
    before: _Sums = struct.unpack_from(">2I", content, 24) if len(content) >= _HEADER else (0, 0)
    is_next = True  # whether the previous frame belongs to the current log
    for index in range(1, (len(content) - _HEADER) // _FRAME + 1):
        header = content[_start(index) : _start(index) + _FRAME_HEADER]
        has_salt = header[8:16] == salt
        if not has_salt and not is_next:
            continue
        body = content[_start(index) + _FRAME_HEADER : _start(index + 1)]
        page, size, _, _, *sums = struct.unpack(">6I", header)
        is_chained = tuple(sums) == _sums(order, header[:8] + body, before)
        before, is_next = (sums[0], sums[1]), has_salt or is_chained
        if is_next:
            yield Frame(index, page, bool(size), body, has_salt and is_chained and page > 0)


def _sums(order: str, content: bytes, before: _Sums) -> _Sums:
    """Return the running checksum after `content`, whose length is a multiple of 8."""
    first, second = before
    words = struct.unpack(f"{order}{len(content) // 4}I", content)
    for even, odd in zip(words[::2], words[1::2], strict=True):
        first = (first + even + second) & 0xFFFFFFFF
        second = (second + odd + first) & 0xFFFFFFFF
    return first, second


def _is_cut(content: bytes, salt: bytes) -> bool:
    """Whether the log ends within a frame."""
    size = (len(content) - _HEADER) % _FRAME
    return 0 < size < 16 or (size >= 16 and content[len(content) - size + 8 :].startswith(salt))


def _committed(shm: bytes, salt: bytes) -> int | None:
    """Return the number of committed frames from the index; None if it is missing or belongs to another log."""
    header = shm[:_INDEX_HEADER]
    if len(header) < _INDEX_HEADER or header != shm[_INDEX_HEADER : 2 * _INDEX_HEADER] or header[32:40] != salt:
        return None
    [count] = struct.unpack_from("=I", header, 16)
    return int(count)
