"""Grammars: the interface for constraints on the tokens of a reply.

The caller compiles a grammar. For each reply, the engine starts a constraint from the grammar, gets the allowed next
tokens from it, and passes it each sampled token.
"""

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Words: TypeAlias = NDArray[np.int32]  # bit t % 32 of word t // 32 belongs to token t


class Constraint(Protocol):
    """The state of one reply within a grammar. Only one thread may use it at a time."""

    @property
    def ended(self) -> bool:
        """Whether the reply has ended, so that no token can follow."""
        ...

    def prefetch_mask(self) -> None:
        """Start computing the mask for `fill`, which must be the next call. Raises the errors of `fill`."""
        ...

    def fill(self, words: Words) -> bool:
        """Set the bits of the allowed next tokens, and clear all others.

        Returns False if every token is allowed; `words` is then unchanged. An exception ends this reply only.
        """
        ...

    def prefetch_accept(self, token_id: int) -> None:
        """Start the work of `accept` for this token. The next call must be that `accept`. Raises nothing."""
        ...

    def accept(self, token_id: int) -> Sequence[int]:
        """Accept an allowed token. Returns the tokens that the grammar forces after it, which are accepted as well."""
        ...


class Grammar(Protocol):
    """The rules for a reply. Immutable and thread-safe."""

    def start(self, *, jumps: bool) -> Constraint:
        """Return a constraint for a new reply. If `jumps` is false, its `accept` never returns tokens."""
        ...
