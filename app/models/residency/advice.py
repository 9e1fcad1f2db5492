"""Advice for two models that do not fit into memory together."""

from collections.abc import Mapping
from dataclasses import dataclass

from app.progress import format_bytes


@dataclass(frozen=True, slots=True)
class Share:
    """The bytes that each of two models would take of one memory, and those that they may use together."""

    needed: tuple[int, int]
    available: int

    def __str__(self) -> str:
        first, second = map(format_bytes, self.needed)
        return f"{first} and {second} of {format_bytes(self.available)}"


@dataclass(frozen=True, slots=True)
class Advice:
    """Why two models do not fit together, and what a user can do."""

    shares: Mapping[str, Share]  # keyed by memory
    remedy: str  # empty: both fit, if no other model is loaded

    @property
    def numbers(self) -> str:
        """The shares in words."""
        return ", ".join(f"{memory} {share}" for memory, share in self.shares.items())
