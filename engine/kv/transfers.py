"""Transfers: copies of blocks between the device pools, the host pools, and files.

`BlockTransfer` is the interface of a backend that copies, and `Transfers` tracks the copies under way. Copies are
asynchronous and may complete in any order. The source and target blocks are held from the start of a copy until its end
has been handled, even if their request ends earlier. No step uses the target blocks in the meantime.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from engine.kv.blocks import BlockKey, BlockPool
from engine.kv.disk.segment_file import DiskBlock
from engine.kv.request_blocks import ChainKey, RequestBlocks, SavedBlocks


@dataclass(frozen=True, slots=True)
class MoveBlock:
    """A copy of one block of one group between the device pool and the host pool."""

    group: int
    source: int
    target: int
    to_host: bool


@dataclass(frozen=True, slots=True)
class ReadBlocks:
    """A read of blocks of one group from files into blocks of the device pool, pairwise in order."""

    group: int
    sources: tuple[DiskBlock, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DirtyBlock:
    """A block of a device pool that is queued to be written."""

    block: int
    key: BlockKey
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WriteBlocks:
    """A write of blocks of one group and one segment from the device pool into a file."""

    group: int
    first_key: BlockKey  # key of the segment's first block
    blocks: tuple[DirtyBlock, ...]


class TransferHandle(Protocol):
    """A transfer that has been started."""

    @property
    def done(self) -> bool:
        """Whether the whole transfer has ended. Checking this is cheap."""
        ...

    @property
    def failed(self) -> bool:
        """Whether any copy of the transfer failed. Valid once `done` is true."""
        ...

    @property
    def seconds(self) -> float:
        """Duration of the transfer. Valid once `done` is true."""
        ...

    @property
    def num_bytes(self) -> int:
        """Number of bytes read from or written to files. Valid once `done` is true."""
        ...


class BlockTransfer(Protocol):
    """Copies blocks. The caller ensures that the steps that wrote the sources have completed."""

    def move(self, moves: Sequence[MoveBlock]) -> TransferHandle:
        """Copy blocks between the device pools and the host pools."""
        ...

    def read(self, reads: Sequence[ReadBlocks]) -> TransferHandle:
        """Copy blocks from files. The transfer fails if a file has changed since it was found; that file is not found
        again.
        """
        ...

    def write(self, write: WriteBlocks) -> TransferHandle:
        """Copy blocks into files. Blocks that cannot be written are left out."""
        ...

    def touch(self, group: int, first_keys: Sequence[BlockKey]) -> None:
        """Mark segments as recently used, so that they are deleted after others. Returns without waiting."""
        ...

    def discard(self, group: int, block: ChainKey) -> None:
        """Delete the files that hold only this block, after the writes already submitted. Returns without waiting."""
        ...

    def forget(self, keys: Collection[BlockKey], first_keys: Sequence[BlockKey]) -> None:
        """Delete the files of segments that hold these blocks, after the writes already submitted. Returns without
        waiting.
        """
        ...

    def wait(self, seconds: float | None = None) -> None:
        """Block until a transfer under way may have ended, at most `seconds`. Returns immediately if there is none."""
        ...

    def close(self) -> None:
        """Wait a limited time for all transfers, and stop the threads. Nothing may be transferred afterwards."""
        ...


PoolBlock = tuple[BlockPool, int]  # a block of a device or host pool


@dataclass(frozen=True, slots=True)
class Saving:
    """A copy of a preempted request's blocks to the host pools."""

    held: RequestBlocks
    saved: SavedBlocks
    moves: Sequence[MoveBlock]
    indices: Sequence[int]  # index in the block table, for each move


@dataclass(frozen=True, slots=True)
class Demoting:
    """A copy of cached blocks to the host pools, started before the device pools evict them."""

    moves: Sequence[MoveBlock]


@dataclass(frozen=True, slots=True)
class Arriving:
    """A copy of a request's blocks to the device, from the host pools or from files."""

    held: RequestBlocks
    moves: Sequence[MoveBlock] = ()
    reads: Sequence[ReadBlocks] = ()


@dataclass(frozen=True, slots=True)
class WritingBack:
    """A write of device blocks to a file."""

    write: WriteBlocks
    first_keys: Sequence[BlockKey]  # the first key of each segment of the chain, up to the segment that is written


Purpose: TypeAlias = Saving | Demoting | Arriving | WritingBack


@dataclass(frozen=True, slots=True, eq=False)
class PendingTransfer:
    """A copy under way, and the blocks that are held for it."""

    purpose: Purpose
    handle: TransferHandle
    held: Sequence[PoolBlock]
    frees_device: bool  # whether waiting requests may use its device blocks once it ends
    cold: bool  # whether its device blocks are evicted first after the copy


class Transfers:
    """Starts copies, and reports which of them have ended. Without a block transfer, no copy may be started."""

    def __init__(
        self, block_transfer: BlockTransfer | None, device: Sequence[BlockPool], host: Sequence[BlockPool]
    ) -> None:
        self._block_transfer = block_transfer
        self._device = device
        self._host = host
        self._under_way: list[PendingTransfer] = []
        self.num_ended = 0

    def __bool__(self) -> bool:
        return bool(self._under_way)

    @property
    def block_transfer(self) -> BlockTransfer:
        """The backend that performs the copies. Raises RuntimeError if there is none."""
        if self._block_transfer is None:
            raise RuntimeError("there is no block transfer, so blocks cannot be copied")
        return self._block_transfer

    def move(self, moves: Sequence[MoveBlock], purpose: Purpose, *, cold: bool = False) -> None:
        """Start copying held blocks between the pools. There must be at least one move."""
        held = [side for move in moves for side in self._sides(move)]
        self._start(
            self.block_transfer.move(moves), purpose, held, frees_device=moves[0].to_host and not cold, cold=cold
        )

    def read(self, reads: Sequence[ReadBlocks], purpose: Purpose) -> None:
        """Start copying from files into held blocks of the device pools."""
        held = [(self._device[read.group], block) for read in reads for block in read.targets]
        self._start(self.block_transfer.read(reads), purpose, held)

    def write(self, write: WriteBlocks, purpose: Purpose) -> None:
        """Start copying findable blocks of a device pool into a file."""
        held = [(self._device[write.group], due.block) for due in write.blocks]
        self._start(self.block_transfer.write(write), purpose, held, frees_device=True)

    def touch(self, group: int, first_keys: Sequence[BlockKey]) -> None:
        """See `BlockTransfer.touch`."""
        self.block_transfer.touch(group, first_keys)

    def discard(self, group: int, block: ChainKey) -> None:
        """See `BlockTransfer.discard`."""
        self.block_transfer.discard(group, block)

    def forget(self, keys: Collection[BlockKey], first_keys: Sequence[BlockKey]) -> None:
        """See `BlockTransfer.forget`."""
        self.block_transfer.forget(keys, first_keys)

    def num_returning(self, group: int) -> int:
        """Return the number of a group's device blocks that become free when the copies under way end."""
        pool = self._device[group]
        held = [side for transfer in self._under_way if transfer.frees_device for side in transfer.held]
        return sum(its_pool is pool and not pool.is_shared(block) for its_pool, block in held)

    def poll(self) -> list[PendingTransfer]:
        """Return the copies that have ended since the last call. Their blocks stay held until `release` is called."""
        ended = [transfer for transfer in self._under_way if transfer.handle.done]
        self._under_way = [transfer for transfer in self._under_way if transfer not in ended]
        self.num_ended += len(ended)
        return ended

    def release(self, transfer: PendingTransfer) -> None:
        """Release the blocks of a copy whose end has been handled."""
        for pool, block in reversed(transfer.held):
            pool.release([block], cold=transfer.cold and pool in self._device)

    def wait(self, seconds: float | None = None) -> None:
        """Block until a copy may have ended, at most `seconds`."""
        if self._under_way:
            self.block_transfer.wait(seconds)

    def close(self) -> None:
        """Stop the threads that copy. Nothing may be copied afterwards."""
        if self._block_transfer is not None:
            self._block_transfer.close()
        self._block_transfer = None
        self._under_way.clear()

    def _start(
        self,
        handle: TransferHandle,
        purpose: Purpose,
        held: Sequence[PoolBlock],
        *,
        frees_device: bool = False,
        cold: bool = False,
    ) -> None:
        for pool, block in held:
            pool.hold(block)
        self._under_way.append(PendingTransfer(purpose, handle, held, frees_device, cold))

    def _sides(self, move: MoveBlock) -> tuple[PoolBlock, PoolBlock]:
        device, host = (move.source, move.target) if move.to_host else (move.target, move.source)
        return (self._device[move.group], device), (self._host[move.group], host)
