"""The KV cache of a GPU: pools in its memory, host pools that it copies from and to by itself.

Copies run on streams of their own, beside the steps. No step is waited for on either side of a copy: whoever asks for
one knows that the steps which wrote its source have been collected, and holds its target until it has ended (see
`engine.kv.transfers`). Blocks that are neighbours on both sides are copied at once.

A host pool is pinned piece by piece, when it is first copied to: the system cannot take back what is pinned, and most
of it may never be used.
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
from engine.kv.cache import KVCache, KVGroup, LayerShape, bytes_of, reserve
from engine.kv.transfers import MoveBlock

log = logging.getLogger(__name__)

PAGE = 4096
PINNED_AT_ONCE = 256 << 20  # bytes, about


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring blocks that become neighbouring blocks."""

    group: int
    to_host: bool
    source: int
    target: int
    count: int


def runs(moves: Iterable[MoveBlock], piece: Sequence[int]) -> Iterator[Run]:
    """The same copies, in as few as possible; none reaches over the end of a piece of a host pool, of which group g has
    piece[g] blocks."""
    run: Run | None = None
    for move in sorted(moves, key=lambda it: (it.group, it.to_host, it.source)):
        host = move.target if move.to_host else move.source
        if (
            run is not None
            and (run.group, run.to_host) == (move.group, move.to_host)
            and (run.source + run.count, run.target + run.count) == (move.source, move.target)
            and host % piece[move.group]
        ):
            run = Run(run.group, run.to_host, run.source, run.target, run.count + 1)
            continue
        if run is not None:
            yield run
        run = Run(move.group, move.to_host, move.source, move.target, 1)
    if run is not None:
        yield run


class GpuBlocks(KVCache):
    """See `KVCache`. Threads may copy at the same time, each on a stream of its own."""

    def __init__(
        self,
        gpu: Gpu,
        groups: Sequence[KVGroup],
        num_blocks: Sequence[int],
        layer_shape: LayerShape,
        dtype: torch.dtype,
        host_blocks: int = 0,
    ) -> None:
        def on_gpu(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=gpu.device)

        super().__init__(groups, num_blocks, layer_shape, dtype, host_blocks, on_gpu, _reserve_pages)
        self._gpu = gpu
        self._streams = threading.local()
        self._pieces = [_piece_blocks(size) for size in self.block_bytes]
        self._pinned: set[tuple[int, int]] = set()  # pieces of host pools, by group
        self._registered: list[Tensor] = []
        weakref.finalize(self, _unpin, gpu, self._registered)

    def move(self, moves: Iterable[MoveBlock]) -> None:
        """Returns when all is copied."""
        with self._stream() as stream:
            for run in runs(moves, self._pieces):
                here, there = self.pools[run.group], self.host_pools[run.group]
                self._pin(run.group, (run.target if run.to_host else run.source) // self._pieces[run.group])
                source, target = (here, there) if run.to_host else (there, here)
                stream.copy(source[run.source : run.source + run.count], target[run.target : run.target + run.count])

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
        """This thread's."""
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
        else:
            log.warning("memory of the host could not be pinned: copies are slower")


def _unpin(gpu: Gpu, registered: Sequence[Tensor]) -> None:
    for memory in registered:
        gpu.unpin(memory)


def _piece_blocks(block_bytes: int) -> int:
    """Whole pages: no two pieces share one."""
    step = PAGE // math.gcd(PAGE, block_bytes)
    return -(-PINNED_AT_ONCE // (block_bytes * step)) * step


def _reserve_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory of the host that begins at a page."""
    size = math.prod(shape) * dtype.itemsize
    memory = reserve((size + PAGE,), torch.uint8)
    first = -memory.data_ptr() % PAGE
    return memory[first : first + size].view(dtype).view(shape)
