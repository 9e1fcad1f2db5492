"""Copies of blocks between the device pool and the host pool: how they are asked for, and how one knows of their end.

Asynchronous for everyone: a mover may copy at once, behind the next steps, or in any order. So both sides of a copy are
held by whoever asked, from `submit` until `done`, and nobody computes with either meanwhile. Knows block numbers.
Refuses to know whose blocks they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Move:
    """One block of one group, from one pool to the other."""

    group: int
    source: int
    target: int
    to_host: bool


class MoveTicket(Protocol):
    """Some moves on their way."""

    @property
    def done(self) -> bool:
        """Whether all of them have ended; asking costs nothing."""
        ...

    @property
    def failed(self) -> bool:
        """Whether one of them did not copy. Known once they are done."""
        ...

    @property
    def seconds(self) -> float:
        """That copying took. Known once they are done."""
        ...


class Mover(Protocol):
    """Copies blocks. Sources were written by steps that have completed."""

    def submit(self, moves: Sequence[Move]) -> MoveTicket: ...

    def wait(self) -> None:
        """Return when something that is under way may have ended; at once where nothing is."""
        ...
