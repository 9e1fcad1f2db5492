"""Copies of blocks between the device pool, the host pool and files: how they are asked for, and how one knows of their
end.

Asynchronous for everyone: a mover may copy at once, behind the next steps, or in any order. So the blocks on both sides
of a copy are held by whoever asked, from its beginning until `done`, and nobody computes with either meanwhile. Knows
block numbers. Refuses to know whose blocks they are.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.kv.blocks import BlockKey
from engine.kv.disk.store import DiskBlock, DiskStore


@dataclass(frozen=True, slots=True)
class Move:
    """One block of one group, from one pool to the other."""

    group: int
    source: int
    target: int
    to_host: bool


@dataclass(frozen=True, slots=True)
class Reading:
    """Blocks of one group in files, into its device pool, in this order."""

    group: int
    sources: tuple[DiskBlock, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DueBlock:
    """A block of a device pool that is to be in a file, too."""

    block: int
    key: BlockKey
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Writing:
    """Blocks of one segment of one group, from its device pool into a file."""

    group: int
    first_key: BlockKey  # of the segment
    blocks: tuple[DueBlock, ...]


class MoveTicket(Protocol):
    """Something on its way."""

    @property
    def done(self) -> bool:
        """Whether all of it has ended; asking costs nothing."""
        ...

    @property
    def failed(self) -> bool:
        """Whether a part of it was not copied. Known once it is done."""
        ...

    @property
    def seconds(self) -> float:
        """That copying took. Known once it is done."""
        ...

    @property
    def num_bytes(self) -> int:
        """That were copied, of what goes from and to files. Known once it is done."""
        ...


class Mover(Protocol):
    """Copies blocks. Sources were written by steps that have completed."""

    @property
    def store(self) -> DiskStore | None:
        """The files."""
        ...

    def submit(self, moves: Sequence[Move]) -> MoveTicket:
        """Copy between the pools."""
        ...

    def read(self, readings: Sequence[Reading]) -> MoveTicket:
        """Copy from files. Fails where a file is not what it was; it is found no more then."""
        ...

    def write(self, writing: Writing) -> MoveTicket:
        """Copy into files, as far as they can be written."""
        ...

    def touch(self, group: int, first_keys: Sequence[BlockKey]) -> None:
        """Segments were used: they are the last to be given up. Nobody waits for it."""
        ...

    def forget(self, keys: Collection[BlockKey], first_keys: Sequence[BlockKey]) -> None:
        """Delete blocks of some segments from the files, behind everything that is being written. Nobody waits."""
        ...

    def wait(self) -> None:
        """Return when something that is under way may have ended; at once where nothing is."""
        ...
