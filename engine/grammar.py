"""Grammars: the interface for constraints on the tokens of a reply.

The caller compiles a grammar. The engine starts one constraint of it per reply, gets the allowed next tokens from it,
and passes it each sampled token.
"""

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Words: TypeAlias = NDArray[np.int32]  # bit t % 32 of word t // 32 belongs to token t


class Constraint(Protocol):
    """The state of one reply within a grammar. Used by one thread at a time."""

    @property
    def ended(self) -> bool:
        """Whether no token can follow: the reply has ended."""
        ...

    def prefetch_mask(self) -> None:
        """Start work for `fill`, which must be the next call. Raises what `fill` raises."""
        ...

    def fill(self, words: Words) -> bool:
        """Set the bits of the allowed next tokens, and no others. Returns False if any token is allowed, without
        changing `words`.

        An exception ends this reply only.
        """
        ...

    def prefetch_accept(self, token_id: int) -> None:
        """Start work for `accept` of this token, which must be the next call. Raises nothing."""
        ...

    def accept(self, token_id: int) -> Sequence[int]:
        """Accept an allowed token. Returns the tokens that must follow it, which are accepted as well."""
        ...


class Grammar(Protocol):
    """The rules for a reply. Immutable, and safe for several threads."""

    def start(self, *, jumps: bool) -> Constraint:
        """Return a constraint for a new reply. Without `jumps`, its `accept` returns no tokens."""
        ...
