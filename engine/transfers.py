"""Copies under way between the device pools and the host pools: what is held for them, and what follows.

Both sides of every copy are held from the moment it is asked for until it has ended, whatever becomes of the requests
that they belong to. Refuses to know why a block is copied. No torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.blocks import BlockPool
from engine.mover import Move, Mover, MoveTicket

Source = tuple[BlockPool, int]  # a block of either tier


@dataclass
class _Transfer:
    ticket: MoveTicket
    moves: Sequence[Move]
    cold: bool  # the device's blocks only lost their place in the cache for this: they are the first to be given up
    then: Callable[[bool], None]


class Transfers:
    """`observe` is told, of each, how many blocks it moved and how long that took."""

    def __init__(
        self,
        mover: Mover | None,
        device: Sequence[BlockPool],
        host: Sequence[BlockPool],
        observe: Callable[[int, float], None],
    ) -> None:
        self._mover = mover
        self._device = device
        self._host = host
        self._observe = observe
        self._under_way: list[_Transfer] = []

    def __bool__(self) -> bool:
        return bool(self._under_way)

    def start(self, moves: Sequence[Move], then: Callable[[bool], None], *, cold: bool = False) -> None:
        """Copy blocks that somebody holds; `then` is told, from `poll`, whether that went well."""
        if not moves or self._mover is None:
            then(not moves)
            return
        for pool, block in (side for move in moves for side in self._sides(move)):
            pool.hold(block)
        self._under_way.append(_Transfer(self._mover.submit(moves), moves, cold, then))

    def returning(self, group: int) -> int:
        """Blocks of a group's device pool that somebody waits for, and that come back when copies end."""
        moves = [move for transfer in self._under_way if not transfer.cold for move in transfer.moves]
        return sum(move.to_host and move.group == group for move in moves)

    def poll(self) -> None:
        """See which have ended."""
        for transfer in [it for it in self._under_way if it.ticket.done]:
            self._under_way.remove(transfer)
            if not transfer.ticket.failed:
                self._observe(len(transfer.moves), transfer.ticket.seconds)
            transfer.then(not transfer.ticket.failed)
            for move in reversed(transfer.moves):
                for pool, block in self._sides(move):
                    pool.release([block], cold=transfer.cold and pool is self._device[move.group])

    def wait(self) -> None:
        """Return when one may have ended."""
        if self._under_way and self._mover is not None:
            self._mover.wait()

    def _sides(self, move: Move) -> tuple[Source, Source]:
        device, host = (move.source, move.target) if move.to_host else (move.target, move.source)
        return (self._device[move.group], device), (self._host[move.group], host)
