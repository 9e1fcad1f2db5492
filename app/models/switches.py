"""Switches: pairs of models that are unloaded for each other, and advice on how both can stay loaded."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from app.progress import format_bytes

MANY_SWITCHES, SWITCH_WINDOW = 3, 300.0  # number of switches between two models in these seconds that causes advice


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


class Switches:
    """The switches between the models of one server, and at most one piece of advice for each pair."""

    def __init__(self) -> None:
        self.advice: dict[tuple[str, str], Advice] = {}  # keyed by the titles of two models
        self._times: dict[frozenset[str], deque[float]] = {}  # times of switches in seconds, keyed by two names
        self._advised: set[frozenset[str]] = set()

    def note(self, unloaded: str, loaded: str, now: float) -> bool:
        """Count a switch between two models. Returns whether there have been many, and no advice yet."""
        times = self._times.setdefault(frozenset((unloaded, loaded)), deque(maxlen=MANY_SWITCHES))
        times.append(now)
        return len(times) == MANY_SWITCHES and now - times[0] <= SWITCH_WINDOW and self.is_first(unloaded, loaded)

    def is_first(self, one: str, other: str) -> bool:
        """Whether no advice has been asked for about two models. From now on, it has."""
        pair = frozenset((one, other))
        is_new = pair not in self._advised
        self._advised.add(pair)
        return is_new
