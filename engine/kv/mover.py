"""Mover: the interface that copies blocks between the device pools, the host pools, and files.

Copies are asynchronous: a mover may copy at once, after the next steps, or in any order. The caller holds the blocks on
both sides of a copy until `done`, and no step computes with either meanwhile.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.kv.blocks import BlockKey
from engine.kv.disk.run_file import DiskBlock


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
