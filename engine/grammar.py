"""Grammars: what the tokens of a reply may be, given those before.

A grammar is compiled by the caller. The engine starts one constraint of it for each reply, asks which tokens may
follow, and tells the constraint which one was picked.
"""

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Words: TypeAlias = NDArray[np.int32]  # bit t % 32 of word t // 32 stands for token t


class Constraint(Protocol):
    """One reply on its way through a grammar. Used by one thread at a time."""

    @property
    def ended(self) -> bool:
        """Whether nothing can follow: the reply is over."""
        ...

    def prefetch_mask(self) -> None:
        """The next call is `fill`: what computes elsewhere may begin. Raises what `fill` raises."""
        ...

    def fill(self, words: Words) -> bool:
        """Set the bits of the tokens that may come next, and no others. False where any may: `words` are as they were.

        Whatever it raises ends the reply, and no other.
        """
        ...

    def prefetch_accept(self, token_id: int) -> None:
        """The next call is `accept` of this token: what computes elsewhere may begin. Raises nothing."""
        ...

    def accept(self, token_id: int) -> Sequence[int]:
        """Take a token, which was allowed. Returns those that must follow it, which are taken as well."""
        ...


class Grammar(Protocol):
    """What a reply must be like. Immutable, and safe for several threads."""

    def start(self, *, jumps: bool) -> Constraint:
        """A constraint at its beginning; where it does not jump, `accept` gives no tokens."""
        ...
