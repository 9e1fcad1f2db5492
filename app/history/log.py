"""SQLite's write-ahead log: which of its frames SQLite applies, and whether it lost any.

A log (https://sqlite.org/fileformat2.html#walformat) is a header and frames. A frame is a page that a transaction
changed, and the last frame of a transaction commits it. The checksums of frames form a chain: SQLite applies the frames
up to the last commit before the first frame whose checksum is wrong, and drops the rest without an error. A process
that is killed while it writes leaves such a rest, too; the index of the log (the -shm file) tells the two cases apart,
since it counts the frames of all transactions that were committed.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from app.history.schema import PAGE_SIZE

_HEADER, _FRAME_HEADER = 32, 24
_FRAME = _FRAME_HEADER + PAGE_SIZE
_MAGIC, _VERSION = 0x377F0682, 3007000
_INDEX_HEADER = 48  # bytes; the index begins with two copies of it

_Sums = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Frame:
    """One changed page."""

    page: int  # its number, from 1 on
    is_commit: bool
    content: bytes


@dataclass(frozen=True, slots=True)
class Log:
    """The frames since the log was last begun anew, oldest first."""

    frames: Sequence[Frame] = ()
    applied: int = 0  # frames that SQLite applies, from the first one on
    is_damaged: bool = False  # SQLite would drop frames that were committed, or may have been
    is_complete: bool = True  # no frame of those is missing, as far as that can be known

    @property
    def usable(self) -> Sequence[Frame]:
        """The frames to read rows from: of a damaged log, every frame that there is."""
        return self.frames if self.is_damaged else self.frames[: self.applied]


def read_log(content: bytes, index: bytes = b"") -> Log:
    """Judge the bytes of a log file. `index` is the content of its -shm file, if there is one."""
    if not content.strip(b"\0"):  # created, and never written
        return Log()
    has_header = _is_header(content)
    salt = content[16:24] if has_header else content[_HEADER + 8 : _HEADER + 16]
    found = list(_frames(content, salt))
    applied = sound = 0
    for count, (_, frame, is_sound) in enumerate(found, 1):
        if not has_header or not is_sound:
            break
        sound, applied = count, count if frame.is_commit else applied
    is_log = has_header or any(is_sound for _, _, is_sound in found)
    is_cut, committed = _is_cut(content, salt), _committed(index, salt)
    has_rest = not has_header or sound < len(found) or is_cut
    is_damaged = has_rest if committed is None else committed > applied or (has_rest and committed < applied)
    last = found[-1][0] if found else 0
    is_complete = is_log and not is_cut and max(last, committed or 0) == len(found)
    return Log([frame for _, frame, _ in found] if is_log else (), applied, is_damaged, is_complete)


def _is_header(content: bytes) -> bool:
    if len(content) < _HEADER:
        return False
    magic, version, page_size = struct.unpack_from(">3I", content)
    sums = struct.unpack_from(">2I", content, 24)
    is_known = magic & ~1 == _MAGIC and version == _VERSION and page_size == PAGE_SIZE
    return is_known and sums == _sums(_order(content), content[:24], (0, 0))


def _order(content: bytes) -> str:
    """The byte order of the words that are summed."""
    return ">" if content[3] & 1 and content[:3] == _MAGIC.to_bytes(4, "big")[:3] else "<"


def _frames(content: bytes, salt: bytes) -> Iterator[tuple[int, Frame, bool]]:
    """The number of each frame of the current log, the frame, and whether its salt and its checksum are right.

    Frames of an older log, which was written over up to here, have another salt.
    """
    order = _order(content)
    before: _Sums = struct.unpack_from(">2I", content, 24) if len(content) >= _HEADER else (0, 0)
    is_next = True  # whether the frame before this one belongs to the current log
    for number, start in enumerate(range(_HEADER, len(content) - _FRAME + 1, _FRAME), 1):
        page, size, has_salt = *struct.unpack_from(">2I", content, start), content[start + 8 : start + 16] == salt
        if not has_salt and not is_next:
            continue
        body = content[start + _FRAME_HEADER : start + _FRAME]
        stored: _Sums = struct.unpack_from(">2I", content, start + 16)
        is_chained = stored == _sums(order, content[start : start + 8] + body, before)
        before, is_next = stored, has_salt or is_chained
        if is_next:
            yield number, Frame(page, bool(size), body), has_salt and is_chained and page > 0


def _sums(order: str, content: bytes, before: _Sums) -> _Sums:
    """The running checksum after `content`, whose length is a multiple of 8."""
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


def _committed(index: bytes, salt: bytes) -> int | None:
    """How many frames were committed, by the index of the log; None if it is of another log, or none."""
    header = index[:_INDEX_HEADER]
    if len(header) < _INDEX_HEADER or header != index[_INDEX_HEADER : 2 * _INDEX_HEADER] or header[32:40] != salt:
        return None
    [count] = struct.unpack_from("=I", header, 16)
    return int(count)
