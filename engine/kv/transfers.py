"""Copies under way between the device pools, the host pools and files: what is held for them, and what follows.

The blocks on both sides of every copy are held from the moment it is asked for until it has ended, whatever becomes of
the requests that they belong to. Refuses to know why a block is copied. No torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.kv.blocks import BlockPool
from engine.kv.mover import Move, Mover, MoveTicket, Reading, Writing

PoolBlock = tuple[BlockPool, int]  # a block of either pool

Then = Callable[[MoveTicket | None], None]  # what follows; it is given the ticket, or None where nothing was copied


@dataclass
class _Transfer:
    ticket: MoveTicket
    held: Sequence[PoolBlock]
    then: Then
    gives_back: bool  # somebody may wait for the blocks of the device that are held
    cold: bool  # those only lost their place in the cache for this: they are the first to be given up


class Transfers:
    """Where there is no mover, nothing is ever copied."""

    def __init__(self, mover: Mover | None, device: Sequence[BlockPool], host: Sequence[BlockPool]) -> None:
        self.mover = mover
        self._device = device
        self._host = host
        self._under_way: list[_Transfer] = []
        self.num_ended = 0

    def __bool__(self) -> bool:
        return bool(self._under_way)

    def move(self, moves: Sequence[Move], then: Then, *, cold: bool = False) -> None:
        """Copy blocks that somebody holds between the pools; `then` is called from `poll`, when that has ended."""
        if not moves or self.mover is None:
            then(None)
            return
        held = [side for move in moves for side in self._sides(move)]
        self._start(self.mover.submit(moves), held, then, gives_back=moves[0].to_host and not cold, cold=cold)

    def read(self, readings: Sequence[Reading], then: Then) -> None:
        """The same, from files into blocks of the device pools that somebody holds."""
        if not readings or self.mover is None:
            then(None)
            return
        held = [(self._device[reading.group], block) for reading in readings for block in reading.targets]
        self._start(self.mover.read(readings), held, then)

    def write(self, writing: Writing, then: Then) -> None:
        """The same, from findable blocks of a device pool into files."""
        if self.mover is not None:
            pool = self._device[writing.group]
            held = [(pool, due.block) for due in writing.blocks]
            self._start(self.mover.write(writing), held, then, gives_back=True)

    def returning(self, group: int) -> int:
        """Blocks of a group's device pool that come back when copies end, so that it is worth to wait for them."""
        pool = self._device[group]
        held = [side for transfer in self._under_way if transfer.gives_back for side in transfer.held]
        return sum(its_pool is pool and not pool.is_shared(block) for its_pool, block in held)

    def poll(self) -> None:
        """See which have ended."""
        for transfer in [it for it in self._under_way if it.ticket.done]:
            self._under_way.remove(transfer)
            self.num_ended += 1
            transfer.then(transfer.ticket)
            for pool, block in reversed(transfer.held):
                pool.release([block], cold=transfer.cold and pool in self._device)

    def wait(self) -> None:
        """Return when one may have ended."""
        if self._under_way and self.mover is not None:
            self.mover.wait()

    def _start(
        self,
        ticket: MoveTicket,
        held: Sequence[PoolBlock],
        then: Then,
        *,
        gives_back: bool = False,
        cold: bool = False,
    ) -> None:
        for pool, block in held:
            pool.hold(block)
        self._under_way.append(_Transfer(ticket, held, then, gives_back, cold))

    def _sides(self, move: Move) -> tuple[PoolBlock, PoolBlock]:
        device, host = (move.source, move.target) if move.to_host else (move.target, move.source)
        return (self._device[move.group], device), (self._host[move.group], host)
