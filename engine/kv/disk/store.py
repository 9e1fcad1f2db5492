"""The files of one model: blocks found by the key of their segment, read with all checks, and written.

The file system is the index. A segment is SEGMENT_BLOCKS consecutive places of a chain, and the key of its first block
stands for everything before it; a file is named by that key and its KV group, and lies in the folder of the key's first
byte. So to find a segment is to list one folder and to read the heads of few files, what other processes write is seen
at once, and there is no index to load or to lose. A process appends to files that it made itself, to no others.

Whatever is wrong with a file, it is a miss: one line in the log, and it is gone. What cannot be written is not. Refuses
to know what is in a block, and which request it is of.
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

MOST_OWN_FILES = 4096  # files that are appended to
MOST_HEADS = 512  # that are remembered, at 50 KB each
PAUSE = 60.0  # seconds without writing, after it failed
_SETTLED = 100_000_000  # ns since a folder changed: a change within the same tick of its clock would not be seen

FilledBlock = tuple[BlockKey, Sequence[int], memoryview]  # with the token ids and the data


class DiskMiss(EngineError):
    """Blocks that were found cannot be read any more."""


@dataclass(slots=True)
class _OwnFile:
    """A file that is appended to."""

    path: Path
    header: SegmentHeader
    count: int = 0


@dataclass(slots=True)
class _Listing:
    """The files of one folder, by the beginning of their names."""

    changed: int  # when the folder was, in ns
    names: dict[str, list[str]] = field(default_factory=dict)


class DiskStore:
    """Safe for several threads, and for several processes over one folder."""

    def __init__(
        self,
        folder: Path,
        fingerprint: bytes,
        block_bytes: Sequence[int],
        quota: Quota,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`block_bytes` are those of one block of each KV group. Touches nothing yet."""
        self.folder = folder
        self._fingerprint = fingerprint
        self._block_bytes = tuple(block_bytes)
        self._quota = quota
        self._clock = clock
        self._writing = threading.Lock()  # held while files are written: nobody who looks for blocks waits for that
        self._lock = threading.RLock()  # what is remembered of the folder
        self._listings: dict[str, _Listing] = {}
        self._heads: OrderedDict[Path, Head] = OrderedDict()
        self._bad: dict[Path, float] = {}  # and until when
        self._own_files: OrderedDict[tuple[int, BlockKey], _OwnFile] = OrderedDict()
        self._paused_until = 0.0
        self._has_warned = False

    # -- finding

    def find(self, group: int, first_key: BlockKey) -> Mapping[BlockKey, DiskBlock]:
        """All blocks of a segment that can be read, as it seems."""
        found: dict[BlockKey, DiskBlock] = {}
        for path, head in self._heads_of(group, first_key):
            for index, entry in head.entries.items():
                found.setdefault(entry.key, DiskBlock(path, head.header, index, entry.key, entry.token_ids))
        return found

    def _heads_of(self, group: int, first_key: BlockKey) -> list[tuple[Path, Head]]:
        """The files of a segment, and what they hold."""
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
        listing = _Listing(changed if time.time_ns() - changed > _SETTLED else 0)
        for name in sorted(os.listdir(self.folder / shard)):
            if name.endswith(SUFFIX):
                listing.names.setdefault(segment_of(name), []).append(name)
        return listing

    def _head(self, path: Path, group: int, first_key: BlockKey) -> Head | None:
        """What a file says it holds; files only grow, so that one of the same length says the same."""
        try:
            known = self._heads.get(path)
            if known is not None and known.size == os.lstat(path).st_size:
                self._heads.move_to_end(path)
                return known
            with open_segment(path) as file:
                head = read_head(file)
            self._check(head.header, group, first_key)
        except FileNotFoundError:  # it made room for others
            return None
        except (BadSegment, OSError) as problem:
            self._quarantine(path, problem)
            return None
        if head.is_complete:
            self._heads[path] = head
            while len(self._heads) > MOST_HEADS:
                self._heads.popitem(last=False)
        return head

    def _check(self, header: SegmentHeader, group: int, first_key: BlockKey) -> None:
        if header.fingerprint != self._fingerprint:
            raise BadSegment("it is of another model")
        if (header.group, header.block_bytes) != (group, self._block_bytes[group]):
            raise BadSegment("its blocks are of another kind")
        if header.first_key != first_key:
            raise BadSegment("it is of another segment")

    def _quarantine(self, path: Path, problem: Exception) -> None:
        """A file is bad: it is deleted, and found no more; or it cannot be read, and is not for a while. Told once."""
        is_bad = isinstance(problem, BadSegment)
        with self._lock:
            is_news = path not in self._bad
            self._bad[path] = math.inf if is_bad else self._clock() + PAUSE
            self._heads.pop(path, None)
        if is_news:
            log.warning("%s is left out of the cache: %s", path, problem)
        if is_bad:
            with contextlib.suppress(OSError):
                path.unlink()

    # -- reading

    def read(self, blocks: Sequence[DiskBlock], into: Callable[[int, memoryview], None]) -> int:
        """Read blocks of one group, those next to each other in a file at once, and give each to `into` with its index
        in `blocks`. Returns bytes. Raises DiskMiss at the first that is not what it was; its file is found no more."""
        num_bytes = 0
        for start, stop in _of_one_file(blocks):
            part = blocks[start:stop]
            try:
                num_bytes += self._read_file(part, start, into)
            except (BadSegment, OSError) as problem:
                if not isinstance(problem, FileNotFoundError):  # it made room for others
                    self._quarantine(part[0].path, problem)
                raise DiskMiss(f"{part[0].path} cannot be used: {problem}") from problem
        return num_bytes

    def _read_file(self, blocks: Sequence[DiskBlock], start: int, into: Callable[[int, memoryview], None]) -> int:
        with open_segment(blocks[0].path) as file:
            head = read_head(file)
            if head.header != blocks[0].header:
                raise BadSegment("it is another one than it was")
            for block in blocks:
                entry = head.entries.get(block.index)
                if entry is None or (entry.key, entry.token_ids) != (block.key, block.token_ids):
                    raise BadSegment(f"entry {block.index} is damaged")
            indexes = [block.index for block in blocks]
            read_blocks(file, head, indexes, lambda position, data: into(start + position, data))
            return len(blocks) * head.header.block_bytes

    # -- writing

    @property
    def is_paused(self) -> bool:
        """Whether nothing is written for now, since that failed."""
        return self._clock() < self._paused_until

    def write(self, group: int, first_key: BlockKey, blocks: Sequence[FilledBlock]) -> int:
        """Append blocks of a segment, those that are not there yet. Returns bytes; fewer than asked where it fails,
        which is told once."""
        num_bytes = 0
        try:
            with self._writing:
                there = self.find(group, first_key)
                missing = [block for block in blocks if block[0] not in there]
                while missing and not self.is_paused:
                    own = self._own_file(group, first_key)
                    part, missing = missing[: SEGMENT_BLOCKS - own.count], missing[SEGMENT_BLOCKS - own.count :]
                    num_bytes += self._append(own, part)
            self._quota.charge(num_bytes)
        except OSError as problem:
            # What is gone was deleted just now, by a process that makes room or by the user: a later miss.
            if not isinstance(problem, FileNotFoundError) or not self.folder.parent.is_dir():
                self._pause(problem)
        return num_bytes

    def _own_file(self, group: int, first_key: BlockKey) -> _OwnFile:
        """A file with room for at least one block more."""
        own = self._own_files.pop((group, first_key), None)
        if own is None or own.count == SEGMENT_BLOCKS or own.path in self._bad or not own.path.exists():
            own = self._new_file(group, first_key)
        self._own_files[group, first_key] = own
        while len(self._own_files) > MOST_OWN_FILES:
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
            del self._own_files[own.header.group, own.header.first_key]  # where it ends is not known any more
            if isinstance(problem, FileNotFoundError):  # it just made room for others
                return 0
            raise
        own.count += len(blocks)
        return len(blocks) * own.header.block_bytes

    def _pause(self, problem: OSError) -> None:
        self._paused_until = self._clock() + PAUSE
        with contextlib.suppress(OSError):
            self._quota.enforce()  # where others took the room, there may be less for us
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "nothing is kept in %s for now: %s. What is computed is computed again after a restart; "
                "make room there, or choose another folder (kv_disk_dir).",
                self.folder,
                problem,
            )

    # -- keeping and giving up

    def touch(self, group: int, first_keys: Sequence[BlockKey]) -> None:
        """Segments of a chain were used: they are given up last, the end of the chain before its beginning."""
        now = time.time_ns()
        for depth, first_key in enumerate(first_keys):
            when = now - depth * 1_000_000
            with self._lock:
                paths = self._paths(group, first_key)
            for path in paths:
                with contextlib.suppress(OSError):
                    os.utime(path, ns=(when, when), follow_symlinks=os.utime not in os.supports_follow_symlinks)

    def forget(self, keys: Collection[BlockKey], first_keys: Sequence[BlockKey]) -> int:
        """Delete every file of these segments that holds one of the keys, or may hold it, with whatever else is in it.
        How many."""
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
    """Where consecutive blocks of one file start and stop."""
    start = 0
    for stop in range(1, len(blocks) + 1):
        if stop == len(blocks) or blocks[stop].path != blocks[start].path:
            yield start, stop
            start = stop
