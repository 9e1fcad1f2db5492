"""Recent prompts and replies as token ids: finds the one that shares the longest prefix with a new prompt."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

Items = TypeVar("Items", bytes, tuple[int, ...])  # slices of two kinds would never be equal


def common_prefix_len(one: Items, other: Items, start: int = 0) -> int:
    """How many items both begin with; the first `start` are known to be equal."""
    stop, step = min(len(one), len(other)), 1
    while start < stop and one[start : start + step] == other[start : start + step]:
        start, step = start + step, 2 * step
    while step > 1:  # what differs, or the end, is among the next `step` items
        step //= 2
        if start < stop and one[start : start + step] == other[start : start + step]:
            start += step
    return min(start, stop)


ID_BYTES = array("i").itemsize
MAX_EXCHANGES = 64
MAX_TOKENS = 2_000_000  # 8 MB


def packed(ids: Iterable[int]) -> bytes:
    """Token ids side by side, `ID_BYTES` each."""
    return array("i", ids).tobytes()


def unpacked(ids: bytes) -> "array[int]":
    return array("i", ids)


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """A prompt with as much of its reply as is known."""

    salt: str  # those of different salts know nothing of each other
    ids: bytes
    prompt_tokens: int  # the first of them; the others were generated
    computed: int  # tokens whose keys and values were computed and could be found; at least

    @property
    def tokens(self) -> int:
        return len(self.ids) // ID_BYTES


@dataclass(frozen=True, slots=True)
class Earlier:
    """The exchange that a prompt has most in common with."""

    exchange: Exchange
    common: int  # tokens that both begin with


class RecentPrompts:
    def __init__(self, max_exchanges: int = MAX_EXCHANGES, max_tokens: int = MAX_TOKENS) -> None:
        self._max_exchanges = max_exchanges
        self._max_tokens = max_tokens
        self._exchanges: list[Exchange] = []  # the latest last; none begins with all of another
        self._tokens = 0

    def nearest(self, prompt: bytes, salt: str) -> Earlier | None:
        """Of several that share as much, the latest, even where that is nothing. None where there is none."""
        best, common = None, 0
        longer_prefix = prompt[:ID_BYTES]  # what one has to begin with to have more in common than the best
        for exchange in reversed(self._exchanges):
            if exchange.salt != salt:
                continue
            if exchange.ids.startswith(longer_prefix):
                best, common = exchange, common_prefix_len(exchange.ids, prompt, len(longer_prefix))
                common -= common % ID_BYTES
                longer_prefix = prompt[: common + ID_BYTES]
                if common == len(prompt):
                    break
            best = best or exchange
        return None if best is None else Earlier(best, common // ID_BYTES)

    def remember(self, exchange: Exchange) -> None:
        """An exchange takes the place of those that it goes on from. The longest ago is forgotten first."""
        for other in tuple(self._exchanges):
            if other.salt == exchange.salt:
                longer, shorter = (exchange, other) if exchange.tokens >= other.tokens else (other, exchange)
                if longer.ids.startswith(shorter.ids):
                    self._forget(other)
                    exchange = replace(longer, computed=max(longer.computed, shorter.computed))
        self._exchanges.append(exchange)
        self._tokens += exchange.tokens
        while len(self._exchanges) > self._max_exchanges or self._tokens > self._max_tokens:
            self._forget(self._exchanges[0])

    def _forget(self, exchange: Exchange) -> None:
        self._exchanges.remove(exchange)
        self._tokens -= exchange.tokens
