"""DiskStore: the segment files of one model. Finds, reads, verifies, and writes blocks.

The file system is the index. A segment is SEGMENT_BLOCKS consecutive blocks of a chain, identified by the key of its
first block, which depends on all blocks before it. The file name contains this key and the KV group, and the folder is
named after the key's first byte. To find a segment, the store lists one folder and reads the heads of the segment's
files. Blocks that other processes write are found at once, and there is no index to load or to lose. A process appends
only to files that it created.

A damaged file is logged once and deleted, and its blocks count as misses. If writing fails, the blocks are not stored.
"""

import contextlib
import itertools
import logging
import math
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine.errors import EngineError
from engine.kv.blocks import BlockKey
from engine.kv.disk.quota import Quota
from engine.kv.disk.segment_file import (
    SEGMENT_BLOCKS,
    SUFFIX,
    BadSegment,
    DiskBlock,
    Head,
    SegmentHeader,
    append,
    create,
    open_segment,
    read_blocks,
    read_head,
    segment_name,
    segment_of,
    shard_name,
)
from engine.private_folder import private_folder

log = logging.getLogger(__name__)

MAX_OWN_FILES = 4096  # maximum number of files that this process appends to
MAX_HEADS = 512  # maximum number of heads kept in memory, 50 KB each
SINGLE_BLOCK_BYTES = 16 << 20  # a block of this size, which is a state, has its own file, so that it can be deleted
WRITE_PAUSE = 60.0  # seconds for which writing is suspended after a failure
# A listing is reused only if the folder had been unchanged for this many ns when it was read. Otherwise a change in the
# same clock tick would be missed.
_LISTING_MIN_AGE = 100_000_000

FilledBlock = tuple[BlockKey, Sequence[int], memoryview]  # key, token ids, and data of a block


class DiskMiss(EngineError):
    """Blocks that were found earlier can no longer be read."""


@dataclass(slots=True)
class _OwnFile:
    """A file that this process created and appends to."""

    path: Path
    header: SegmentHeader
    count: int = 0


@dataclass(slots=True)
class _Listing:
    """The files of one folder, by segment."""

    changed: int  # modification time of the folder in ns
    names: dict[str, list[str]] = field(default_factory=dict)


class DiskStore:
    """The blocks of one model in files. Safe for several threads, and for several processes with the same folder."""

    def __init__(
        self,
        folder: Path,
        fingerprint: bytes,
        block_bytes: Sequence[int],
        quota: Quota,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a store without accessing the folder yet. `block_bytes` is the size of one block of each KV group."""
        self.folder = folder
        self._fingerprint = fingerprint
        self._block_bytes = tuple(block_bytes)
        self._file_blocks = [1 if size >= SINGLE_BLOCK_BYTES else SEGMENT_BLOCKS for size in block_bytes]
        self._quota = quota
        self._clock = clock
        self._writing = threading.Lock()  # held while files are written; lookups do not take it
        self._lock = threading.RLock()  # guards the in-memory heads, listings, and failures of files
        self._listings: dict[str, _Listing] = {}
        self._heads: OrderedDict[Path, Head] = OrderedDict()
        self._bad: dict[Path, float] = {}  # file -> time until which it is not read; inf: forever
        self._own_files: OrderedDict[tuple[int, BlockKey], _OwnFile] = OrderedDict()
        self._paused_until = 0.0
        self._has_warned = False

    # -- finding

    def find(self, group: int, first_key: BlockKey) -> Mapping[BlockKey, DiskBlock]:
        """Return all blocks of a segment whose entries are valid. Their data is not read yet."""
        found: dict[BlockKey, DiskBlock] = {}
        for path, head in self._heads_of(group, first_key):
            for index, entry in head.entries.items():
                found.setdefault(entry.key, DiskBlock(path, head.header, index, entry.key, entry.token_ids))
        return found

    def _heads_of(self, group: int, first_key: BlockKey) -> list[tuple[Path, Head]]:
        """Return the files of a segment that have a valid head, with their heads."""
        with self._lock:
            paths = self._paths(group, first_key)
            return [(path, head) for path in paths if (head := self._head(path, group, first_key))]

    def _paths(self, group: int, first_key: BlockKey) -> list[Path]:
        return [path for path in self._all_paths(group, first_key) if self._clock() >= self._bad.get(path, 0.0)]

    def _all_paths(self, group: int, first_key: BlockKey) -> list[Path]:
        segment = segment_name(group, first_key)
        shard = shard_name(segment)
        try:
            changed = os.stat(self.folder / shard).st_mtime_ns
            listing = self._listings.get(shard)
            if listing is None or listing.changed != changed:
                listing = self._listings[shard] = self._list(shard, changed)
        except OSError:
            return []
        return [self.folder / shard / name for name in listing.names.get(segment, ())]

    def _list(self, shard: str, changed: int) -> _Listing:
        listing = _Listing(changed if time.time_ns() - changed > _LISTING_MIN_AGE else 0)
        for name in sorted(os.listdir(self.folder / shard)):
            if name.endswith(SUFFIX):
                listing.names.setdefault(segment_of(name), []).append(name)
        return listing

    def _head(self, path: Path, group: int, first_key: BlockKey) -> Head | None:
        """Return the head of a file, or None if it is invalid.

        Files only grow, so a cached head is valid while the size of the file is unchanged.
        """
        try:
            known = self._heads.get(path)
            if known is not None and known.size == os.lstat(path).st_size:
                self._heads.move_to_end(path)
                return known
            with open_segment(path) as file:
                head = read_head(file)
            self._check(head.header, group, first_key)
        except FileNotFoundError:  # another process deleted it to free space
            return None
        except (BadSegment, OSError) as problem:
            self._quarantine(path, problem)
            return None
        if head.is_complete:
            self._heads[path] = head
            while len(self._heads) > MAX_HEADS:
                self._heads.popitem(last=False)
        return head

    def _check(self, header: SegmentHeader, group: int, first_key: BlockKey) -> None:
        if header.fingerprint != self._fingerprint:
            raise BadSegment("it belongs to another model")
        if (header.group, header.block_bytes) != (group, self._block_bytes[group]):
            raise BadSegment("its blocks have another group or size")
        if header.first_key != first_key:
            raise BadSegment("it belongs to another segment")

    def _quarantine(self, path: Path, problem: Exception) -> None:
        """Delete a damaged file, or ignore an unreadable one for a while. The problem is logged once per file."""
        is_bad = isinstance(problem, BadSegment)
        with self._lock:
            is_news = path not in self._bad
            self._bad[path] = math.inf if is_bad else self._clock() + WRITE_PAUSE
            self._heads.pop(path, None)
        if is_news:
            log.warning("%s is left out of the cache: %s", path, problem)
        if is_bad:
            with contextlib.suppress(OSError):
                path.unlink()

    # -- reading

    def read(self, blocks: Sequence[DiskBlock], into: Callable[[int, memoryview], None]) -> int:
        """Read blocks of one group, with one read for adjacent ones. Calls into(index in `blocks`, data) for each
        block.

        Returns the number of bytes read. Raises DiskMiss at the first block that has changed; `find` then ignores its
        file.
        """
        num_bytes = 0
        for start, stop in _of_one_file(blocks):
            part = blocks[start:stop]
            try:
                num_bytes += self._read_file(part, start, into)
            except (BadSegment, OSError) as problem:
                # FileNotFoundError: another process deleted the file to free space
                if not isinstance(problem, FileNotFoundError):
                    self._quarantine(part[0].path, problem)
                raise DiskMiss(f"{part[0].path} cannot be used: {problem}") from problem
        return num_bytes

    def _read_file(self, blocks: Sequence[DiskBlock], start: int, into: Callable[[int, memoryview], None]) -> int:
        with open_segment(blocks[0].path) as file:
            head = read_head(file)
            if head.header != blocks[0].header:
                raise BadSegment("it was replaced")
            for block in blocks:
                entry = head.entries.get(block.index)
                if entry is None or (entry.key, entry.token_ids) != (block.key, block.token_ids):
                    raise BadSegment(f"entry {block.index} is damaged")
            indexes = [block.index for block in blocks]
            read_blocks(file, head, indexes, lambda position, data: into(start + position, data))
            return len(blocks) * head.header.block_bytes

    # -- writing

    def prepare(self) -> None:
        """Create the folder. If that fails, log it, and suspend writing."""
        try:
            private_folder(self.folder)
        except OSError as problem:
            self._pause(problem)

    @property
    def is_paused(self) -> bool:
        """Whether writing is suspended after a failure."""
        return self._clock() < self._paused_until

    def write(self, group: int, first_key: BlockKey, blocks: Sequence[FilledBlock]) -> int:
        """Append the blocks of a segment that are not stored yet.

        Returns the number of bytes written: fewer than requested if writing fails, which is logged once.
        """
        num_bytes = 0
        try:
            with self._writing:
                there = self.find(group, first_key)
                missing = [block for block in blocks if block[0] not in there]
                while missing and not self.is_paused:
                    own = self._own_file(group, first_key)
                    space = self._file_blocks[group] - own.count
                    part, missing = missing[:space], missing[space:]
                    num_bytes += self._append(own, part)
            self._quota.charge(num_bytes)
        except OSError as problem:
            # FileNotFoundError: the user or another process just deleted a file to free space. Its blocks merely count
            # as misses later.
            if not isinstance(problem, FileNotFoundError) or not self.folder.parent.is_dir():
                self._pause(problem)
        return num_bytes

    def _own_file(self, group: int, first_key: BlockKey) -> _OwnFile:
        """Return a file of the segment with space for at least one more block, creating it if necessary."""
        own = self._own_files.pop((group, first_key), None)
        if own is None or own.count == self._file_blocks[group] or own.path in self._bad or not own.path.exists():
            own = self._new_file(group, first_key)
        self._own_files[group, first_key] = own
        while len(self._own_files) > MAX_OWN_FILES:
            self._own_files.popitem(last=False)
        return own

    def _new_file(self, group: int, first_key: BlockKey) -> _OwnFile:
        segment = segment_name(group, first_key)
        path = private_folder(self.folder / shard_name(segment)) / f"{segment}-{secrets.token_hex(4)}{SUFFIX}"
        header = SegmentHeader(self._fingerprint, group, self._block_bytes[group], first_key, secrets.token_bytes(16))
        create(path, header)
        return _OwnFile(path, header)

    def _append(self, own: _OwnFile, blocks: Sequence[FilledBlock]) -> int:
        try:
            append(own.path, own.header, own.count, blocks)
        except OSError as problem:
            del self._own_files[own.header.group, own.header.first_key]  # the failed write makes its length unknown
            if isinstance(problem, FileNotFoundError):  # another process just deleted it to free space
                return 0
            raise
        own.count += len(blocks)
        return len(blocks) * own.header.block_bytes

    def _pause(self, problem: OSError) -> None:
        self._paused_until = self._clock() + WRITE_PAUSE
        with contextlib.suppress(OSError):
            self._quota.enforce()  # The limit may have become lower because other programs took disk space.
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "writing the KV cache to %s is suspended: %s. New tokens will be computed again after a restart. "
                "Free some space there, or choose another folder (kv_disk_dir).",
                self.folder,
                problem,
            )

    # -- use and deletion

    def touch(self, group: int, first_keys: Sequence[BlockKey]) -> None:
        """Mark segments of a chain as used now, with times such that later segments are deleted before earlier ones."""
        now = time.time_ns()
        for depth, first_key in enumerate(first_keys):
            when = now - depth * 1_000_000
            with self._lock:
                paths = self._paths(group, first_key)
            for path in paths:
                with contextlib.suppress(OSError):
                    os.utime(path, ns=(when, when), follow_symlinks=os.utime not in os.supports_follow_symlinks)

    def discard(self, group: int, key: BlockKey, first_key: BlockKey) -> None:
        """Delete the files that hold only the block with this key."""
        with self._writing:
            for path, head in self._heads_of(group, first_key):
                if head.is_complete and {it.key for it in head.entries.values()} == {key}:
                    with contextlib.suppress(OSError):
                        path.unlink()

    def forget(self, keys: Collection[BlockKey], first_keys: Sequence[BlockKey]) -> int:
        """Delete each file of these segments that holds one of the keys, or that cannot be checked.

        Other blocks in these files are lost. Returns the number of deleted files.
        """
        deleted = 0
        with self._writing, self._lock:
            for group, first_key in itertools.product(range(len(self._block_bytes)), first_keys):
                for path in self._all_paths(group, first_key):
                    head = self._head(path, group, first_key)
                    if head is None or not head.is_complete or any(it.key in keys for it in head.entries.values()):
                        with contextlib.suppress(OSError):
                            path.unlink()
                            deleted += 1
        return deleted


def _of_one_file(blocks: Sequence[DiskBlock]) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) for each run of blocks that are in the same file."""
    start = 0
    for stop in range(1, len(blocks) + 1):
        if stop == len(blocks) or blocks[stop].path != blocks[start].path:
            yield start, stop
            start = stop
