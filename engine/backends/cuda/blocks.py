"""The KV cache of a GPU: pools in GPU memory, and host pools for asynchronous copies in both directions.

Copies run on separate streams, in parallel with steps, and do not wait for steps. The caller must ensure that the steps
that wrote the source have been collected, and must hold the target until the copy has ended (see
`engine.kv.transfers`). Blocks that are adjacent on both sides are copied together.

A part of a host pool is pinned when it is first used: the system cannot swap out pinned memory, and most of a pool may
never be used.
"""

import logging
import math
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.backends.cuda.gpu import CopyStream, Gpu
from engine.kv.cache import KVCache, KVGroup, bytes_of, reserve
from engine.kv.transfers import MoveBlock

log = logging.getLogger(__name__)

PAGE = 4096
# Maximum bytes that are pinned or copied at once. Pinning more would delay kernel launches, and a sampled token waits
# for the copy before it.
PIECE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class BlockRange:
    """A run of adjacent source blocks that is copied to adjacent target blocks."""

    group: int
    to_host: bool
    source: int
    target: int
    count: int


def merge_ranges(moves: Iterable[MoveBlock], piece: Sequence[int]) -> Iterator[BlockRange]:
    """Merge copies into as few ranges as possible.

    No range crosses the border between two parts of a host pool that are pinned separately. In group g, each part has
    piece[g] blocks.
    """
    part: BlockRange | None = None
    for move in sorted(moves, key=lambda it: (it.group, it.to_host, it.source)):
        host = move.target if move.to_host else move.source
        if (
            part is not None
            and (part.group, part.to_host) == (move.group, move.to_host)
            and (part.source + part.count, part.target + part.count) == (move.source, move.target)
            and host % piece[move.group]
        ):
            part = BlockRange(part.group, part.to_host, part.source, part.target, part.count + 1)
            continue
        if part is not None:
            yield part
        part = BlockRange(move.group, move.to_host, move.source, move.target, 1)
    if part is not None:
        yield part


class GpuBlocks(KVCache):
    """The `KVCache` of a GPU. Threads may copy at the same time, each on its own stream."""

    computes_on_host = False

    def __init__(
        self,
        gpu: Gpu,
        groups: Sequence[KVGroup],
        num_blocks: Sequence[int],
        host_blocks: Sequence[int] = (),
    ) -> None:
        def on_gpu(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=gpu.device)

        super().__init__(groups, num_blocks, host_blocks, on_gpu, _reserve_pages)
        self._gpu = gpu
        self._streams = threading.local()
        self._pieces = [_piece_blocks(size) for size in self.block_bytes]
        self._pinned: set[tuple[int, int]] = set()  # (group, number of a part of its host pool)
        self._registered: list[Tensor] = []
        self._warned = False
        self._finalizer = weakref.finalize(self, _unpin, gpu, self._registered)

    def move(self, moves: Iterable[MoveBlock]) -> None:
        """Copy blocks. Returns when all copies have ended."""
        with self._stream() as stream:
            for part in merge_ranges(moves, self._pieces):
                here, there = self.pools[part.group], self.host_pools[part.group]
                self._pin(part.group, (part.target if part.to_host else part.source) // self._pieces[part.group])
                source, target = (here, there) if part.to_host else (there, here)
                stream.copy(
                    source[part.source : part.source + part.count], target[part.target : part.target + part.count]
                )

    def unpin(self) -> None:
        self._finalizer()

    def contents(self, group: int, blocks: Sequence[int]) -> list[memoryview]:
        pool = bytes_of(self.pools[group])
        staging = self._gpu.staging(len(blocks), pool.shape[1], dtype=torch.uint8)
        with self._stream() as stream:
            for block, content in zip(blocks, staging, strict=True):
                stream.copy(pool[block], content)
        return [content.numpy().data for content in staging]

    def fill(self, group: int, block: int, content: memoryview) -> None:
        staging = self._gpu.staging(len(content), dtype=torch.uint8)
        staging.numpy().data[:] = content
        with self._stream() as stream:
            stream.copy(staging, bytes_of(self.pools[group])[block])

    def _stream(self) -> CopyStream:
        """Return the copy stream of the calling thread."""
        if not hasattr(self._streams, "mine"):
            self._streams.mine = self._gpu.copy_stream()
        mine: CopyStream = self._streams.mine
        return mine

    def _pin(self, group: int, piece: int) -> None:
        if (group, piece) in self._pinned:
            return
        self._pinned.add((group, piece))
        size = self._pieces[group]
        memory = bytes_of(self.host_pools[group])[piece * size : (piece + 1) * size]
        if self._gpu.pin(memory):
            self._registered.append(memory)
        elif not self._warned:
            self._warned = True
            log.warning("host memory could not be pinned, so copies are slower")


def _unpin(gpu: Gpu, registered: Sequence[Tensor]) -> None:
    for memory in registered:
        gpu.unpin(memory)


def _piece_blocks(block_bytes: int) -> int:
    """Return the number of blocks per pinned part: a whole number of pages, so that no two parts share a page.

    A part has at most PIECE_BYTES bytes, unless the smallest possible one is larger.
    """
    step = PAGE // math.gcd(PAGE, block_bytes)
    return max(1, PIECE_BYTES // (block_bytes * step)) * step


def _reserve_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Reserve page-aligned host memory."""
    size = math.prod(shape) * dtype.itemsize
    memory = reserve((size + PAGE,), torch.uint8)
    first = -memory.data_ptr() % PAGE
    return memory[first : first + size].view(dtype).view(shape)
