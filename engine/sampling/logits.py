"""Logits of a step, and how a device may draw tokens from them by itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.grammar import Words


class Draw(Protocol):
    """Draws tokens of rows that have no filters, sooner than `engine.sampling.drawing` does."""

    def __call__(
        self,
        logits: Tensor,
        rows: Sequence[int],
        words: Words,
        places: Sequence[int],
        temperatures: Sequence[float],
        uniforms: Sequence[float],
    ) -> list[int]:
        """One token for each of some `rows` of float32 [rows, vocabulary], of what has a bit in the row of `words` at
        its place, -1: of all. Less than 0 where nothing of that is likely, or infinitely so."""
        ...


@dataclass(frozen=True, slots=True)
class Logits:
    """What a step computed, one row for each of the batch's logit rows. Valid until the device's next step."""

    buffer: Tensor  # float32 [rows or more, vocabulary]
    greedy: Sequence[int] | None = None  # the most likely token of each row, -1 where none is a number; None: not known
    rows: int | None = None  # None: all of the buffer
    draw: Draw | None = None  # None: the device has none of its own

    @property
    def values(self) -> Tensor:
        """float32 [rows, vocabulary]"""
        return self.buffer[: self.rows]
