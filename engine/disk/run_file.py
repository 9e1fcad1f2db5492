"""One run file: a bag of up to RUN_BLOCKS blocks of one KV group, each checked by itself.

    header   what the blocks are of: model, group, size of a block, first key of their segment; with a checksum
    table    RUN_BLOCKS entries: key and token ids of a block, checksum of its data, checksum of the entry
    data     the blocks, in the order of their entries, from DATA_START on

All numbers are little-endian. A block's data is written before its entry, so that a file is whole at any moment: what
was torn has no entry, or a last one that does not fit its checksum, which counts as none. Nothing that is read is
believed before it is checked. Knows one open file. Refuses to know where it lies and what else there is.
"""

import os
import stat
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from engine.blocks import BlockKey
from engine.config import BLOCK_SIZE

RUN_BLOCKS = 64  # that a segment has, and that a file holds at most

MAGIC = b"INGLEKV\0"
VERSION = 1
KEY_BYTES = 32
DATA_START = 8192  # behind header and table, at the beginning of a page
READ_AT_ONCE = 8 << 20  # bytes

_HEADER = struct.Struct(f"<8sIIIQ{KEY_BYTES}s{KEY_BYTES}s16s")
_CHECKSUM = struct.Struct("<I")
_ENTRY = struct.Struct(f"<{KEY_BYTES}s{BLOCK_SIZE}II")
_ENTRY_BYTES = _ENTRY.size + _CHECKSUM.size
_TABLE_START = _HEADER.size + _CHECKSUM.size
_ABSENT = bytes(_ENTRY_BYTES)

# Where the system has them: links are not followed, pipes not waited for, bytes not translated.
_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


class BadRun(Exception):
    """A file is not what its name says; the text says why."""


@dataclass(frozen=True, slots=True)
class RunHeader:
    """What the blocks of a file are of."""

    fingerprint: bytes  # of the model, and all else that keys and values depend on; KEY_BYTES
    group: int
    block_bytes: int
    first_key: BlockKey  # of the segment
    identity: bytes  # 16 random bytes, so that an entry belongs to this file alone

    def to_bytes(self) -> bytes:
        fields = MAGIC, VERSION, RUN_BLOCKS, self.group, self.block_bytes, self.fingerprint, self.first_key
        return _with_checksum(_HEADER.pack(*fields, self.identity))

    @classmethod
    def from_bytes(cls, head: bytes) -> "RunHeader":
        """Raises BadRun."""
        raw = _without_checksum(head[:_TABLE_START])
        magic, version, blocks, group, block_bytes, fingerprint, first_key, identity = _HEADER.unpack(
            raw if raw is not None else head[: _HEADER.size]
        )
        if magic != MAGIC:
            raise BadRun("it is no run file")
        if (version, blocks) != (VERSION, RUN_BLOCKS):
            raise BadRun(f"it has version {version}, and not {VERSION}")
        if raw is None:
            raise BadRun("its header is damaged")
        return cls(fingerprint, group, block_bytes, BlockKey(first_key), identity)


@dataclass(frozen=True, slots=True)
class Entry:
    """What the table says of one block."""

    key: BlockKey
    token_ids: tuple[int, ...]
    checksum: int  # of the data

    def to_bytes(self, index: int, identity: bytes) -> bytes:
        return _with_checksum(_ENTRY.pack(self.key, *self.token_ids, self.checksum), _seed(index, identity))

    @classmethod
    def from_bytes(cls, raw: bytes, index: int, identity: bytes) -> "Entry | None":
        """None where it does not fit its checksum."""
        fields = _without_checksum(raw, _seed(index, identity))
        if fields is None:
            return None
        key, *token_ids, checksum = _ENTRY.unpack(fields)
        return cls(BlockKey(key), tuple(token_ids), checksum)

    def fits(self, data: memoryview) -> bool:
        return data_checksum(self.key, data) == self.checksum


def data_checksum(key: BlockKey, data: memoryview) -> int:
    """Of a block's data, which is that of no other key."""
    return zlib.crc32(data, zlib.crc32(key))


def _seed(index: int, identity: bytes) -> int:
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

    header: RunHeader
    entries: Mapping[int, Entry]  # by index
    size: int  # bytes of the file

    @property
    def is_settled(self) -> bool:
        """Whether every block in the file has its entry, so that nothing is just being written, as far as one sees."""
        return self.size == DATA_START + len(self.entries) * self.header.block_bytes


@contextmanager
def opened(path: Path) -> Iterator[FileIO]:
    """A file of ours and of nobody else, for reading. Raises BadRun or OSError."""
    if path.is_symlink():
        raise BadRun("it is a link")
    with FileIO(os.open(path, os.O_RDONLY | _FLAGS), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise BadRun("it is no plain file")
        if hasattr(os, "geteuid") and (status.st_uid != os.geteuid() or status.st_mode & 0o077):
            raise BadRun("others may read or write it")
        yield file


def read_head(file: FileIO) -> Head:
    """Raises BadRun or OSError."""
    size = os.fstat(file.fileno()).st_size
    file.seek(0)
    head = _read(file, bytearray(DATA_START))
    header = RunHeader.from_bytes(bytes(head[:_TABLE_START]))
    raws = [bytes(head[start : start + _ENTRY_BYTES]) for start in _entry_starts()]
    there = [index for index, raw in enumerate(raws) if raw != _ABSENT]
    entries: dict[int, Entry] = {}
    for index in there:
        entry = Entry.from_bytes(raws[index], index, header.identity)
        if entry is not None:
            entries[index] = entry
        elif index != there[-1]:  # the last one may be torn, or just being written
            raise BadRun(f"entry {index} is damaged")
    if entries and size < DATA_START + (max(entries) + 1) * header.block_bytes:
        raise BadRun("it is cut off")
    return Head(header, entries, size)


def read_blocks(file: FileIO, head: Head, indexes: Sequence[int], into: Callable[[int, memoryview], None]) -> None:
    """Read some blocks, those next to each other at once, and give each to `into` with its place in `indexes`.

    Raises BadRun at the first that does not fit its entry, or OSError.
    """
    size = head.header.block_bytes
    most = max(1, READ_AT_ONCE // size)
    done = 0
    while done < len(indexes):
        count = 1
        while count < most and done + count < len(indexes) and indexes[done + count] == indexes[done] + count:
            count += 1
        file.seek(DATA_START + indexes[done] * size)
        content = memoryview(_read(file, bytearray(count * size)))
        for place in range(done, done + count):
            data = content[(place - done) * size :][:size]
            if not head.entries[indexes[place]].fits(data):
                raise BadRun(f"block {indexes[place]} is damaged")
            into(place, data)
        done += count


def verify(path: Path) -> str:
    """What is wrong with a file; empty where nothing is. Reads all of it."""
    try:
        with opened(path) as file:
            head = read_head(file)
            read_blocks(file, head, sorted(head.entries), lambda place, data: None)
    except (BadRun, OSError) as problem:
        return str(problem) or type(problem).__name__
    return ""


def _read(file: FileIO, buffer: bytearray) -> bytearray:
    view, done = memoryview(buffer), 0
    while done < len(buffer):
        count = file.readinto(view[done:])
        if not count:
            raise BadRun("it is cut off")
        done += count
    return buffer


def _entry_starts() -> range:
    return range(_TABLE_START, _TABLE_START + RUN_BLOCKS * _ENTRY_BYTES, _ENTRY_BYTES)


# -- writing


def create(path: Path, header: RunHeader) -> None:
    """A new file without blocks. Raises OSError."""
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | _FLAGS
    with FileIO(os.open(path, flags, 0o600), "wb") as file:
        _write(file, 0, [header.to_bytes().ljust(DATA_START, b"\0")])


def append(
    path: Path, header: RunHeader, count: int, blocks: Sequence[tuple[BlockKey, Sequence[int], memoryview]]
) -> None:
    """Write blocks behind the first `count` of a file. Raises OSError."""
    entries = [Entry(key, tuple(token_ids), data_checksum(key, data)) for key, token_ids, data in blocks]
    raws = [entry.to_bytes(count + number, header.identity) for number, entry in enumerate(entries)]
    with FileIO(os.open(path, os.O_WRONLY | _FLAGS), "wb") as file:
        _write(file, DATA_START + count * header.block_bytes, [data for _, _, data in blocks])
        _write(file, _entry_starts()[count], raws)


def _write(file: FileIO, start: int, parts: Sequence[bytes | memoryview]) -> None:
    file.seek(start)
    for part in parts:
        view = memoryview(part).cast("B")
        while view:
            view = view[file.write(view) :]
