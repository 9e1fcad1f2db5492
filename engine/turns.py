"""Turns: which engine of a process computes next on the CPU.

Steps of several engines would slow each other down if they ran at the same time, because each uses all cores. A step
therefore takes a turn. Turns are given by weighted fair queueing: the next turn goes to the engine that has used the
least seconds, divided by the weight of its most urgent request. An engine that becomes busy starts level with the
others, and comes first among equals if its weight is higher.

An engine is between two steps for a moment. Others that come after it wait for that moment (GRACE), because turns
would otherwise alternate regardless of how long they are.
"""

import math
import threading
import time
import weakref
from collections.abc import Callable

GRACE = 0.01  # seconds that others wait for an engine between two steps
SLICE = 0.06  # seconds after its start for which other threads of the same model may join a turn that others wait for
STREAMING_SECONDS = 1.0  # seconds after its last turn for which the streams of an engine count


class Turns:
    """The turns of all engines of a process that compute on the CPU. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._all: weakref.WeakSet[Turn] = weakref.WeakSet()
        self._holder: Turn | None = None
        self._reached = 0.0  # the largest weighted seconds at which a turn has started

    def join(self) -> "Turn":
        """Return the turn of an engine that was loaded."""
        turn = Turn(self)
        with self._changed:
            self._all.add(turn)
        return turn

    def begin(self, turn: "Turn", weight: int, streams: int) -> None:
        """See `Turn.begin`."""
        with self._changed:
            now = self._clock()
            if now > turn.returns_until and turn is not self._holder:  # it was idle, which earns nothing
                turn.used = max(turn.used, self._reached)
            turn.weight, turn.streams = weight, streams
            turn.waiting += 1
            try:
                while (delay := self.delay(turn)) > 0:
                    self._changed.wait(None if math.isinf(delay) else delay)
            finally:
                turn.waiting -= 1
            if not turn.inside:
                self._holder, turn.began = turn, self._clock()
                self._reached = max(self._reached, turn.used)
            turn.inside += 1

    def end(self, turn: "Turn", *, returns: bool) -> None:
        """See `Turn.end`."""
        with self._changed:
            if not turn.inside:
                return
            turn.inside -= 1
            if not turn.inside:
                turn.ended = self._clock()
                turn.used += (turn.ended - turn.began) / turn.weight
                turn.returns_until = turn.ended + GRACE * returns
                self._holder = None
                self._changed.notify_all()

    def leave(self, turn: "Turn") -> None:
        """See `Turn.close`."""
        with self._changed:
            self._all.discard(turn)
            if self._holder is turn:
                self._holder = None
            turn.inside = 0
            self._changed.notify_all()

    def delay(self, turn: "Turn") -> float:
        """Return the seconds until a thread may compute; inf if a turn must end first."""
        now = self._clock()
        if self._holder is not None:
            joins = now < turn.began + SLICE or not any(other.waiting for other in self._all if other is not turn)
            return 0.0 if self._holder is turn and joins else math.inf
        earlier = [other for other in self._all if other is not turn and other.rank < turn.rank]
        if any(other.waiting for other in earlier):
            return math.inf
        return max([0.0, *(other.returns_until - now for other in earlier)])

    def other_streams(self, turn: "Turn") -> int:
        """See `Turn.other_streams`."""
        with self._changed:
            return sum(other.streams for other in self._active() if other is not turn)

    def is_active(self) -> bool:
        """Whether an engine computes, waits to compute, or has computed in the last second."""
        with self._changed:
            return bool(self._active())

    def _active(self) -> "list[Turn]":
        since = self._clock() - STREAMING_SECONDS
        return [turn for turn in self._all if turn.inside or turn.waiting or turn.ended > since]


class Turn:
    """The turns of one engine or encoder. All fields belong to `Turns`."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self.used = 0.0  # seconds of its turns, each divided by the weight of that turn
        self.weight = 1
        self.streams = 0  # number of requests that generate tokens
        self.waiting = 0  # number of its threads that wait for a turn
        self.inside = 0  # number of its threads that compute
        self.began = self.ended = -math.inf  # times of the last turn
        self.returns_until = -math.inf  # time until which others wait for its next turn

    @property
    def rank(self) -> tuple[float, int, int]:
        """The key by which turns are ordered, lowest first."""
        return self.used, -self.weight, id(self)

    @property
    def is_taken(self) -> bool:
        """Whether a thread of this engine computes."""
        return self.inside > 0

    def begin(self, weight: int, streams: int = 0) -> None:
        """Wait until this engine may compute.

        `weight` is that of its most urgent request, and `streams` the number of requests that generate tokens.
        """
        self._turns.begin(self, weight, streams)

    def end(self, *, returns: bool = False) -> None:
        """Let others compute. Has no effect without a turn. `returns`: whether the next step follows at once."""
        self._turns.end(self, returns=returns)

    @property
    def other_streams(self) -> int:
        """Number of requests of other engines that generate tokens, and so wait while this engine computes."""
        return self._turns.other_streams(self)

    def close(self) -> None:
        """Give up the turn and take no more. Later calls have no effect."""
        self._turns.leave(self)
