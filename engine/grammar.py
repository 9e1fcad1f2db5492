"""Grammars: the interface for constraints on the tokens of a reply.

The caller compiles a grammar. For each reply, the engine starts a constraint from the grammar, gets the allowed next
tokens from it, and passes it each sampled token. Drafted tokens are checked before the step that verifies them. They
form runs: a run is a drafted token and the tokens that the grammar forces after it.
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

    def prefetch_mask(self, runs: int = 0) -> None:
        """Start computing the mask for `fill`, which must be the next call. Raises the errors of `fill`."""
        ...

    def fill(self, words: Words, runs: int = 0) -> bool:
        """Set the bits of the tokens allowed after the first `runs` runs of `look_ahead`, and clear all others.

        Returns False if every token is allowed; `words` is then unchanged. An exception ends this reply only.
        """
        ...

    def prefetch_look_ahead(self, drafted: Sequence[int], seconds: float) -> None:
        """Start the work of `look_ahead`. The next call must be that `look_ahead`. Raises nothing."""
        ...

    def look_ahead(self, drafted: Sequence[int], seconds: float) -> Sequence[int]:
        """Divide the start of a draft into runs that the grammar allows. Returns their lengths.

        Leaves out the run that would end the reply, because no token follows it, and runs whose masks are not expected
        within `seconds`. The state of the reply does not change. Valid until the next `accept`. Raises nothing.
        """
        ...

    def prefetch_accept(self, token_ids: Sequence[int]) -> None:
        """Start the work of `accept` for these tokens. The next calls must be those `accept`. Raises nothing."""
        ...

    def accept(self, token_id: int) -> Sequence[int]:
        """Accept an allowed token. Returns the tokens that the grammar forces after it, which are accepted as well."""
        ...


class Grammar(Protocol):
    """The rules for a reply. Immutable and thread-safe."""

    def start(self, *, jumps: bool) -> Constraint:
        """Return a constraint for a new reply. If `jumps` is false, its `accept` never returns tokens."""
        ...
