"""Recent prompts and their replies as token ids, to find the one with the longest common prefix with a new prompt."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

Items = TypeVar("Items", bytes, tuple[int, ...])  # a type variable, since slices of different types are never equal


def common_prefix_len(one: Items, other: Items, start: int = 0) -> int:
    """Return the number of equal items at the start of two sequences. The first `start` items are known to be equal.

    The step doubles while the slices are equal, then a binary search finds the first difference.
    """
    stop, step = min(len(one), len(other)), 1
    while start < stop and one[start : start + step] == other[start : start + step]:
        start, step = start + step, 2 * step
    while step > 1:  # the first difference, or the end, is within the next `step` items
        step //= 2
        if start < stop and one[start : start + step] == other[start : start + step]:
            start += step
    return min(start, stop)


ID_BYTES = array("i").itemsize
MAX_EXCHANGES = 64
MAX_TOKENS = 2_000_000  # limit of the tokens of all exchanges: 8 MB


def packed(ids: Iterable[int]) -> bytes:
    """Pack token ids into bytes, `ID_BYTES` per id."""
    return array("i", ids).tobytes()


def unpacked(ids: bytes) -> "array[int]":
    return array("i", ids)


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """A prompt, and the part of its reply that is known so far."""

    salt: str  # exchanges match only prompts with the same salt
    ids: bytes
    prompt_tokens: int  # length of the prompt; the ids after it were generated
    computed: int  # number of tokens whose keys and values were certainly in the KV cache

    @property
    def tokens(self) -> int:
        return len(self.ids) // ID_BYTES


@dataclass(frozen=True, slots=True)
class Earlier:
    """The exchange with the longest common prefix with a prompt."""

    exchange: Exchange
    common: int  # length of that prefix in tokens


class RecentPrompts:
    def __init__(self, max_exchanges: int = MAX_EXCHANGES, max_tokens: int = MAX_TOKENS) -> None:
        self._max_exchanges = max_exchanges
        self._max_tokens = max_tokens
        self._exchanges: list[Exchange] = []  # exchanges, latest last; none is a prefix of another
        self._tokens = 0

    def nearest(self, prompt: bytes, salt: str) -> Earlier | None:
        """Return the exchange with the longest common prefix, which may be empty. The latest one wins a tie.

        None if no exchange has the salt.
        """
        best, common = None, 0
        longer_prefix = prompt[:ID_BYTES]  # an exchange must start with this to beat the best one
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
        """Add an exchange. It replaces those that are a prefix of it. The oldest ones are dropped beyond the limits."""
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
