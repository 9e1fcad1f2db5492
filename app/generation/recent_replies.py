"""The last replies of a server: where the tokens of their prompts came from, and their times. No text is kept."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from app.generation.cache_report import MissReason
from app.generation.events import TokenCounts
from engine.request import Origin, TokenSources

MAX_REPLIES = 50


@dataclass(frozen=True, slots=True)
class RecentReply:
    """A request that has ended. Durations are in seconds."""

    model: str
    origin: Origin
    ended_at: float  # Unix time
    prompt: int  # tokens of the prompt
    sources: TokenSources
    miss: MissReason | None
    missed_at: int | None  # index of the prompt token at which the cache stopped matching
    completion: int  # tokens of the replies
    first_token_seconds: float | None  # None: no reply was complete
    total_seconds: float
    outcome: str  # why the request ended early; empty: it did not


class RecentReplies:
    """The last replies of all models of a server, newest first. Used on one event loop."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """`clock` returns Unix time."""
        self._clock = clock
        self._replies: deque[RecentReply] = deque(maxlen=MAX_REPLIES)

    def __iter__(self) -> Iterator[RecentReply]:
        return iter(self._replies)

    def add(self, model: str, origin: Origin, counts: TokenCounts, outcome: str = "") -> None:
        miss, first = counts.cache.miss, counts.first_token_seconds
        self._replies.appendleft(
            RecentReply(
                model,
                origin,
                self._clock(),
                counts.prompt or counts.prompt_total,
                counts.cache.sources,
                None if miss is None else miss.reason,
                None if miss is None else miss.position,
                counts.completion,
                None if math.isinf(first) else first,
                counts.total_seconds,
                outcome,
            )
        )
