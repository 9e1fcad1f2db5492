"""One run file: a bag of up to SEGMENT_BLOCKS blocks of one KV group, each checked by itself.

    header   what the blocks are of: model, group, size of a block, first key of their segment; with a checksum
    table    SEGMENT_BLOCKS entries: key and token ids of a block, checksum of its data, checksum of the entry;
             both fit at this position of this file alone
    data     the blocks, in the order of their entries, from DATA_START on

All numbers are little-endian. A block's data is written before its entry, so that a file is whole at any moment: what
was torn has no entry, or a last one whose last byte is still zero, which counts as none. Nothing that is read is
believed before it is checked. Knows one open file. Refuses to know where it lies and what else there is.
"""

import contextlib
import os
import re
import stat
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from engine.config import BLOCK_SIZE
from engine.kv.blocks import BlockKey

SEGMENT_BLOCKS = 64  # that a segment has, and that a file holds at most
SUFFIX, UNFINISHED = ".run", ".tmp"  # of names

MAGIC = b"INGLEKV\0"
VERSION = 1
KEY_BYTES = 32
DATA_START = 8192  # behind header and table, at the beginning of a page
READ_AT_ONCE = 1 << 20  # bytes, about: checked and handed on while the processor still has them near
LOOKS, BETWEEN_LOOKS = 3, 2e-3  # seconds: at a table that may be just being written, before it counts as damaged

_HEADER = struct.Struct(f"<8sIIIQ{KEY_BYTES}s{KEY_BYTES}s16s")
_CHECKSUM = struct.Struct("<I")
_ENTRY = struct.Struct(f"<{KEY_BYTES}s{BLOCK_SIZE}II")
_ENTRY_BYTES = _ENTRY.size + _CHECKSUM.size
_TABLE_START = _HEADER.size + _CHECKSUM.size
_ABSENT = bytes(_ENTRY_BYTES)

# Where the system has them: links are not followed, pipes not waited for, bytes not translated.
_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


class BadSegment(Exception):
    """A file is not what its name says; the text says why."""


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """What the blocks of a file are of."""

    fingerprint: bytes  # of the model, and all else that keys and values depend on; KEY_BYTES
    group: int
    block_bytes: int
    first_key: BlockKey  # of the segment
    identity: bytes  # 16 random bytes, so that an entry belongs to this file alone

    def to_bytes(self) -> bytes:
        fields = MAGIC, VERSION, SEGMENT_BLOCKS, self.group, self.block_bytes, self.fingerprint, self.first_key
        return _with_checksum(_HEADER.pack(*fields, self.identity))

    @classmethod
    def from_bytes(cls, head: bytes) -> "SegmentHeader":
        """Raises BadSegment."""
        raw = _without_checksum(head[:_TABLE_START])
        magic, version, blocks, group, block_bytes, fingerprint, first_key, identity = _HEADER.unpack(
            raw if raw is not None else head[: _HEADER.size]
        )
        if magic != MAGIC:
            raise BadSegment("it is no run file")
        if (version, blocks) != (VERSION, SEGMENT_BLOCKS):
            raise BadSegment(f"it has version {version}, and not {VERSION}")
        if raw is None or not block_bytes:
            raise BadSegment("its header is damaged")
        return cls(fingerprint, group, block_bytes, BlockKey(first_key), identity)


@dataclass(frozen=True, slots=True)
class DiskBlock:
    """Where one block lies."""

    path: Path
    header: SegmentHeader  # of the file
    index: int
    key: BlockKey
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """What the table says of one block."""

    key: BlockKey
    token_ids: tuple[int, ...]
    checksum: int  # of the data

    def to_bytes(self, seed: int) -> bytes:
        return _with_checksum(_ENTRY.pack(self.key, *self.token_ids, self.checksum), seed)

    @classmethod
    def from_bytes(cls, raw: bytes, seed: int) -> "Entry | None":
        """None where it does not fit its checksum."""
        fields = _without_checksum(raw, seed)
        if fields is None:
            return None
        key, *token_ids, checksum = _ENTRY.unpack(fields)
        return cls(BlockKey(key), tuple(token_ids), checksum)


def _seed(index: int, identity: bytes) -> int:
    """What the checksums of one position of one file begin with, so that they fit nowhere else."""
    return zlib.crc32(index.to_bytes(4, "little"), zlib.crc32(identity))


def _with_checksum(raw: bytes, seed: int = 0) -> bytes:
    return raw + _CHECKSUM.pack(zlib.crc32(raw, seed))


def _without_checksum(raw: bytes, seed: int = 0) -> bytes | None:
    """None where it does not fit."""
    content, checksum = raw[: -_CHECKSUM.size], raw[-_CHECKSUM.size :]
    return content if _CHECKSUM.pack(zlib.crc32(content, seed)) == checksum else None


# -- reading


@dataclass(frozen=True, slots=True)
class Head:
    """Header and table of a file."""

    header: SegmentHeader
    entries: Mapping[int, Entry]  # by index
    size: int  # bytes of the file

    @property
    def is_complete(self) -> bool:
        """Whether every block in the file has its entry, so that nothing is just being written, as far as one sees."""
        return self.size == DATA_START + len(self.entries) * self.header.block_bytes


@contextmanager
def open_segment(path: Path) -> Iterator[FileIO]:
    """A file of ours and of nobody else, for reading. Raises BadSegment or OSError."""
    if path.is_symlink():
        raise BadSegment("it is a link")
    descriptor = os.open(path, os.O_RDONLY | _FLAGS)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise BadSegment("it is no plain file")
        if hasattr(os, "geteuid") and (status.st_uid != os.geteuid() or status.st_mode & 0o077):
            raise BadSegment("others may read or write it")
        with FileIO(descriptor, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(descriptor)


def read_head(file: FileIO) -> Head:
    """Raises BadSegment or OSError."""
    for look in range(LOOKS):
        time.sleep(BETWEEN_LOOKS * bool(look))
        file.seek(0)
        head = bytes(_read(file, memoryview(bytearray(DATA_START))))
        size = os.fstat(file.fileno()).st_size  # not before: the file may grow, and its data goes first
        header = SegmentHeader.from_bytes(head[:_TABLE_START])
        entries, damaged = _entries(head, header)
        if not damaged:
            break
    else:
        raise BadSegment(f"entry {damaged[0]} is damaged")
    if entries and size < DATA_START + (max(entries) + 1) * header.block_bytes:
        raise BadSegment("it is cut off")
    return Head(header, entries, size)


def _entries(head: bytes, header: SegmentHeader) -> tuple[dict[int, Entry], list[int]]:
    """The entries of a table by their index, and which are damaged."""
    raws = [head[start : start + _ENTRY_BYTES] for start in _entry_starts()]
    there = [index for index, raw in enumerate(raws) if raw != _ABSENT]
    known = {index: Entry.from_bytes(raws[index], _seed(index, header.identity)) for index in there}
    entries = {index: entry for index, entry in known.items() if entry is not None}
    damaged = [index for index in there if index not in entries]
    if damaged and damaged == there[-1:] and raws[there[-1]].endswith(b"\0"):
        return entries, []  # it was torn
    return entries, damaged


def read_blocks(file: FileIO, head: Head, indexes: Sequence[int], into: Callable[[int, memoryview], None]) -> None:
    """Read some blocks, those next to each other at once, and give each to `into` with its position in `indexes`; the
    memory is used again afterwards.

    Raises BadSegment at the first that does not fit its entry, or OSError.
    """
    size = head.header.block_bytes
    most = min(max(1, READ_AT_ONCE // size), len(indexes))
    buffer = memoryview(bytearray(most * size))
    done = 0
    while done < len(indexes):
        count = 1
        while count < most and done + count < len(indexes) and indexes[done + count] == indexes[done] + count:
            count += 1
        file.seek(DATA_START + indexes[done] * size)
        content = _read(file, buffer[: count * size])
        for position in range(done, done + count):
            data, index = content[(position - done) * size :][:size], indexes[position]
            if zlib.crc32(data, _seed(index, head.header.identity)) != head.entries[index].checksum:
                raise BadSegment(f"block {index} is damaged")
            into(position, data)
        done += count


def verify(path: Path) -> str:
    """What is wrong with a file; empty where nothing is. Reads all of it."""
    try:
        with open_segment(path) as file:
            head = read_head(file)
            read_blocks(file, head, sorted(head.entries), lambda position, data: None)
    except (BadSegment, OSError) as problem:
        return str(problem) or type(problem).__name__
    return ""


def _read(file: FileIO, buffer: memoryview) -> memoryview:
    done = 0
    while done < len(buffer):
        count = file.readinto(buffer[done:])
        if not count:
            raise BadSegment("it is cut off")
        done += count
    return buffer


def _entry_starts() -> range:
    return range(_TABLE_START, _TABLE_START + SEGMENT_BLOCKS * _ENTRY_BYTES, _ENTRY_BYTES)


# -- writing


def create(path: Path, header: SegmentHeader) -> None:
    """A new file without blocks. Its name appears when it has a head, so that whoever sees it sees a whole file.

    Raises OSError, and there is nothing then.
    """
    unfinished = path.with_suffix(UNFINISHED)
    try:
        with FileIO(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY | _FLAGS, 0o600), "wb") as file:
            os.chmod(unfinished, 0o600)  # whatever the umask takes away
            _write(file, 0, [header.to_bytes().ljust(DATA_START, b"\0")])
        os.replace(unfinished, path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def append(
    path: Path, header: SegmentHeader, count: int, blocks: Sequence[tuple[BlockKey, Sequence[int], memoryview]]
) -> None:
    """Write blocks behind the first `count` of a file. Raises OSError."""
    raws = []
    for index, (key, token_ids, data) in enumerate(blocks, count):
        seed = _seed(index, header.identity)
        raws.append(Entry(key, tuple(token_ids), zlib.crc32(data, seed)).to_bytes(seed))
    with FileIO(os.open(path, os.O_WRONLY | _FLAGS), "wb") as file:
        _write(file, DATA_START + count * header.block_bytes, [data for _, _, data in blocks])
        _write(file, _entry_starts()[count], [b"".join(raws)])


def _write(file: FileIO, start: int, parts: Sequence[bytes | memoryview]) -> None:
    file.seek(start)
    for part in parts:
        view = memoryview(part).cast("B")
        while view:
            view = view[file.write(view) :]


# -- where files are


ANY_NAME = re.compile(".*", re.DOTALL)


def segment_name(group: int, first_key: BlockKey) -> str:
    """What the names of a segment's files begin with, up to the last dash."""
    return f"{first_key[:16].hex()}-{group}"


def segment_of(name: str) -> str:
    """The same, of a file's name."""
    return name.rpartition("-")[0]


def shard_name(segment: str) -> str:
    """The name of the folder that these files lie in."""
    return segment[:2]


def subfolders(parent: Path, name: re.Pattern[str] = ANY_NAME) -> Iterator[Path]:
    """The folders in a folder, those that can be seen, by the whole of their names."""
    for entry in dir_entries(parent):
        with contextlib.suppress(OSError):
            if name.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                yield Path(entry.path)


def dir_entries(folder: Path) -> list["os.DirEntry[str]"]:
    """What is in a folder; nothing where it cannot be read."""
    with contextlib.suppress(OSError), os.scandir(folder) as found:
        return list(found)
    return []
