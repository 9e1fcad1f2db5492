"""ThreadedTransfer: copies, reads, and writes blocks on threads while the engine computes the next steps.

Copies, reads, and writes have one thread each, so that a slow disk does not delay copies to the host pools, and reads
do not wait for writes. `engine.kv.transfers` describes the interface.
"""

import logging
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from engine.kv.blocks import BlockKey
from engine.kv.cache import KVCache
from engine.kv.disk.store import DiskMiss, DiskStore
from engine.kv.request_blocks import ChainKey
from engine.kv.transfers import MoveBlock, ReadBlocks, WriteBlocks

log = logging.getLogger(__name__)

CLOSE_SECONDS = 1.0  # time limit for the transfers under way when the threads are stopped
WRITE_RATE = 500e6  # limit in bytes per second, because steps need the memory bandwidth at the same time


@dataclass(frozen=True, slots=True)
class _Timed:
    """The duration of a transfer, and the number of bytes that it read from or wrote to files."""

    seconds: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ThreadedHandle:
    """A transfer that was submitted to a thread."""

    _copied: Future[_Timed]
    _unseen: set[Future[_Timed]]  # futures that the caller has not yet seen to be done

    @property
    def done(self) -> bool:
        if self._copied.done():
            self._unseen.discard(self._copied)
        return self._copied.done()

    @property
    def failed(self) -> bool:
        return self._copied.exception() is not None

    @property
    def seconds(self) -> float:
        return self._copied.result().seconds

    @property
    def num_bytes(self) -> int:
        return self._copied.result().num_bytes


class ThreadedTransfer:
    """Copies blocks between the pools of one cache and the files of one store.

    Transfers of the same kind run in the order of their submission.
    """

    def __init__(self, kv: KVCache, store: DiskStore | None = None) -> None:
        self._kv = kv
        self._store = store
        self._copies, self._reads, self._writes = (
            ThreadPoolExecutor(1, thread_name_prefix=f"kv-{name}") for name in ("copies", "reads", "writes")
        )
        self._unseen: set[Future[_Timed]] = set()

    def move(self, moves: Sequence[MoveBlock]) -> ThreadedHandle:
        return self._submit(self._copies, lambda: self._move(moves))

    def read(self, reads: Sequence[ReadBlocks]) -> ThreadedHandle:
        return self._submit(self._reads, lambda: sum(self._read(read) for read in reads))

    def write(self, write: WriteBlocks) -> ThreadedHandle:
        return self._submit(self._writes, lambda: self._write(write))

    def touch(self, group: int, first_keys: Sequence[BlockKey]) -> None:
        if self._store is not None:
            self._writes.submit(self._store.touch, group, first_keys)

    def discard(self, group: int, block: ChainKey) -> None:
        if self._store is not None:
            self._writes.submit(self._store.discard, group, *block)

    def forget(self, keys: Collection[BlockKey], first_keys: Sequence[BlockKey]) -> None:
        if self._store is not None:
            self._writes.submit(self._store.forget, keys, first_keys)

    def wait(self, seconds: float | None = None) -> None:
        wait(self._unseen, seconds, return_when=FIRST_COMPLETED)

    def close(self) -> None:
        threads = self._copies, self._reads, self._writes
        _, late = wait([thread.submit(_do_nothing) for thread in threads], CLOSE_SECONDS)
        for thread in threads:  # a disk that hangs keeps its thread, and the memory that the thread uses
            thread.shutdown(wait=not late, cancel_futures=True)

    def _submit(self, thread: ThreadPoolExecutor, work: Callable[[], int]) -> ThreadedHandle:
        future = thread.submit(_timed, work)
        self._unseen.add(future)
        return ThreadedHandle(future, self._unseen)

    def _move(self, moves: Sequence[MoveBlock]) -> int:
        self._kv.move(moves)
        return 0

    def _read(self, read: ReadBlocks) -> int:
        if self._store is None:
            raise DiskMiss("the disk tier is off")

        def into(number: int, content: memoryview) -> None:
            self._kv.fill(read.group, read.targets[number], content)

        return self._store.read(read.sources, into)

    def _write(self, write: WriteBlocks) -> int:
        if self._store is None:
            return 0
        began = time.perf_counter()
        contents = self._kv.contents(write.group, [it.block for it in write.blocks])
        blocks = [(it.key, it.token_ids, content) for it, content in zip(write.blocks, contents, strict=True)]
        written = self._store.write(write.group, write.first_key, blocks)
        time.sleep(max(0.0, written / WRITE_RATE - (time.perf_counter() - began)))
        return written


def _do_nothing() -> None:
    pass


def _timed(work: Callable[[], int]) -> _Timed:
    began = time.perf_counter()
    try:
        num_bytes = work()
    except DiskMiss:  # the store has logged the reason
        raise
    except Exception:
        log.exception("blocks were not copied")
        raise
    return _Timed(time.perf_counter() - began, num_bytes)
