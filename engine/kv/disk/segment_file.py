"""One segment file: up to SEGMENT_BLOCKS blocks of one KV group, each with a checksum.

    header   model, group, size of a block, first key of the segment; with a checksum
    table    SEGMENT_BLOCKS entries: key and token ids of a block, checksum of its data, checksum of the entry;
             both checksums are valid only at this index of this file
    data     the blocks, in the order of their entries, from DATA_START on

All numbers are little-endian. The data of a block is written before its entry, so that a file is consistent at any
moment. After an interrupted write, the block has either no entry, or an incomplete last entry whose last byte is zero.
Such an entry is ignored. All data is verified before it is used.

The path of a file is MODEL/SHARD/KEY-GROUP-RANDOM.run in the root folder. MODEL is the fingerprint, KEY the start of
the segment's first key, and SHARD the first byte of KEY, all in hex.
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

SEGMENT_BLOCKS = 64  # number of blocks in a segment, and maximum number in one file
SUFFIX, UNFINISHED = ".run", ".tmp"  # suffixes of file names

MAGIC = b"INGLEKV\0"
VERSION = 1
KEY_BYTES = 32
DATA_START = 8192  # start of the data, after the header and the table; a multiple of the page size
# approximate bytes per read, so that the data is still in the CPU cache when its checksums are verified
READ_BATCH_BYTES = 1 << 20
# maximum number of reads of a table that another process may be writing, and seconds between reads
MAX_READS, READ_INTERVAL = 3, 2e-3

_HEADER = struct.Struct(f"<8sIIIQ{KEY_BYTES}s{KEY_BYTES}s16s")
_CHECKSUM = struct.Struct("<I")
_ENTRY = struct.Struct(f"<{KEY_BYTES}s{BLOCK_SIZE}II")
_ENTRY_BYTES = _ENTRY.size + _CHECKSUM.size
_TABLE_START = _HEADER.size + _CHECKSUM.size
_ABSENT = bytes(_ENTRY_BYTES)

# Do not follow links, do not wait for pipes, and do not translate bytes, if the system supports these flags.
_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


class BadSegment(Exception):
    """A file does not match its name or its checksums. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """The header of a file, which describes its blocks."""

    fingerprint: bytes  # KEY_BYTES that identify the model and everything else that keys and values depend on
    group: int
    block_bytes: int
    first_key: BlockKey  # key of the segment's first block
    identity: bytes  # 16 random bytes, which make an entry valid only in this file

    def to_bytes(self) -> bytes:
        fields = MAGIC, VERSION, SEGMENT_BLOCKS, self.group, self.block_bytes, self.fingerprint, self.first_key
        return _with_checksum(_HEADER.pack(*fields, self.identity))

    @classmethod
    def from_bytes(cls, head: bytes) -> "SegmentHeader":
        """Decode a header. Raises BadSegment."""
        raw = _without_checksum(head[:_TABLE_START])
        magic, version, blocks, group, block_bytes, fingerprint, first_key, identity = _HEADER.unpack(
            raw if raw is not None else head[: _HEADER.size]
        )
        if magic != MAGIC:
            raise BadSegment("not a segment file")
        if (version, blocks) != (VERSION, SEGMENT_BLOCKS):
            raise BadSegment(f"version {version} instead of {VERSION}")
        if raw is None or not block_bytes:
            raise BadSegment("the header is damaged")
        return cls(fingerprint, group, block_bytes, BlockKey(first_key), identity)


@dataclass(frozen=True, slots=True)
class DiskBlock:
    """The location of one block in a segment file."""

    path: Path
    header: SegmentHeader  # header of the file
    index: int
    key: BlockKey
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """The table entry of one block."""

    key: BlockKey
    token_ids: tuple[int, ...]
    checksum: int  # checksum of the block's data

    def to_bytes(self, seed: int) -> bytes:
        return _with_checksum(_ENTRY.pack(self.key, *self.token_ids, self.checksum), seed)

    @classmethod
    def from_bytes(cls, raw: bytes, seed: int) -> "Entry | None":
        """Decode an entry. Returns None if its checksum does not match."""
        fields = _without_checksum(raw, seed)
        if fields is None:
            return None
        key, *token_ids, checksum = _ENTRY.unpack(fields)
        return cls(BlockKey(key), tuple(token_ids), checksum)


def _seed(index: int, identity: bytes) -> int:
    """Return the initial value of the checksums at one index of one file, so that they match nowhere else."""
    return zlib.crc32(index.to_bytes(4, "little"), zlib.crc32(identity))


def _with_checksum(raw: bytes, seed: int = 0) -> bytes:
    return raw + _CHECKSUM.pack(zlib.crc32(raw, seed))


def _without_checksum(raw: bytes, seed: int = 0) -> bytes | None:
    """Return the content without its checksum, or None if the checksum does not match."""
    content, checksum = raw[: -_CHECKSUM.size], raw[-_CHECKSUM.size :]
    return content if _CHECKSUM.pack(zlib.crc32(content, seed)) == checksum else None


# -- reading


@dataclass(frozen=True, slots=True)
class Head:
    """The header and the table of a file."""

    header: SegmentHeader
    entries: Mapping[int, Entry]  # table entries by index
    size: int  # bytes of the file

    @property
    def is_complete(self) -> bool:
        """Whether every block in the file has an entry, so that no write seems to be under way."""
        return self.size == DATA_START + len(self.entries) * self.header.block_bytes


@contextmanager
def open_segment(path: Path) -> Iterator[FileIO]:
    """Open a regular file for reading, if no other user can access it. Raises BadSegment or OSError."""
    if path.is_symlink():
        raise BadSegment("a symbolic link")
    descriptor = os.open(path, os.O_RDONLY | _FLAGS)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise BadSegment("not a regular file")
        if hasattr(os, "geteuid") and (status.st_uid != os.geteuid() or status.st_mode & 0o077):
            raise BadSegment("other users can read or write it")
        with FileIO(descriptor, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(descriptor)


def read_head(file: FileIO) -> Head:
    """Read the header and the table of a file. Raises BadSegment or OSError."""
    for look in range(MAX_READS):
        time.sleep(READ_INTERVAL * bool(look))
        file.seek(0)
        head = bytes(_read(file, memoryview(bytearray(DATA_START))))
        # The size is read after the table, because the file may grow and data is written before entries.
        size = os.fstat(file.fileno()).st_size
        header = SegmentHeader.from_bytes(head[:_TABLE_START])
        entries, damaged = _entries(head, header)
        if not damaged:
            break
    else:
        raise BadSegment(f"entry {damaged[0]} is damaged")
    if entries and size < DATA_START + (max(entries) + 1) * header.block_bytes:
        raise BadSegment("truncated")
    return Head(header, entries, size)


def _entries(head: bytes, header: SegmentHeader) -> tuple[dict[int, Entry], list[int]]:
    """Return the valid entries of a table by index, and the indices of damaged entries."""
    raws = [head[start : start + _ENTRY_BYTES] for start in _entry_starts()]
    there = [index for index, raw in enumerate(raws) if raw != _ABSENT]
    known = {index: Entry.from_bytes(raws[index], _seed(index, header.identity)) for index in there}
    entries = {index: entry for index, entry in known.items() if entry is not None}
    damaged = [index for index in there if index not in entries]
    if damaged and damaged == there[-1:] and raws[there[-1]].endswith(b"\0"):
        return entries, []  # the write of this entry was interrupted
    return entries, damaged


def read_blocks(file: FileIO, head: Head, indexes: Sequence[int], into: Callable[[int, memoryview], None]) -> None:
    """Read blocks, with one read for adjacent ones. Calls into(position in `indexes`, data) for each block.

    The memory of the data is reused after the call. Raises BadSegment at the first block that does not match its entry,
    or OSError.
    """
    size = head.header.block_bytes
    most = min(max(1, READ_BATCH_BYTES // size), len(indexes))
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
    """Read a whole file, and return a description of its damage; empty if there is none."""
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
            raise BadSegment("truncated")
        done += count
    return buffer


def _entry_starts() -> range:
    return range(_TABLE_START, _TABLE_START + SEGMENT_BLOCKS * _ENTRY_BYTES, _ENTRY_BYTES)


# -- writing


def create(path: Path, header: SegmentHeader) -> None:
    """Create a file without blocks. The file gets its name only after its header has been written completely.

    Raises OSError, and leaves no file behind.
    """
    unfinished = path.with_suffix(UNFINISHED)
    try:
        with FileIO(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY | _FLAGS, 0o600), "wb") as file:
            os.chmod(unfinished, 0o600)  # removes access for other users, regardless of the umask
            _write(file, 0, [header.to_bytes().ljust(DATA_START, b"\0")])
        os.replace(unfinished, path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def append(
    path: Path, header: SegmentHeader, count: int, blocks: Sequence[tuple[BlockKey, Sequence[int], memoryview]]
) -> None:
    """Write blocks after the first `count` blocks of a file. Raises OSError."""
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


# -- paths


ANY_NAME = re.compile(".*", re.DOTALL)


def segment_name(group: int, first_key: BlockKey) -> str:
    """Return the common prefix of the file names of a segment, up to the last dash."""
    return f"{first_key[:16].hex()}-{group}"


def segment_of(name: str) -> str:
    """Return the prefix of a file name that identifies its segment."""
    return name.rpartition("-")[0]


def shard_name(segment: str) -> str:
    """Return the name of the folder that holds a segment's files."""
    return segment[:2]


def subfolders(parent: Path, name: re.Pattern[str] = ANY_NAME) -> Iterator[Path]:
    """Iterate over the readable folders in `parent` whose full names match `name`."""
    for entry in dir_entries(parent):
        with contextlib.suppress(OSError):
            if name.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                yield Path(entry.path)


def dir_entries(folder: Path) -> list["os.DirEntry[str]"]:
    """Return the entries of a folder; none if it cannot be read."""
    with contextlib.suppress(OSError), os.scandir(folder) as found:
        return list(found)
    return []
