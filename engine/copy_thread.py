"""A mover with a thread of its own: blocks are copied while the engine computes the next steps.

See `engine.mover` for the contract. Refuses to know what is in a block.
"""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from engine.kv_cache import KVCache
from engine.mover import Move

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CopyTicket:
    """Moves of which a thread says how long they took."""

    _seconds: Future[float]

    @property
    def done(self) -> bool:
        return self._seconds.done()

    @property
    def failed(self) -> bool:
        return self._seconds.exception() is not None

    @property
    def seconds(self) -> float:
        return self._seconds.result()


class CopyThread:
    """Copies between the pools of one cache, in the order in which it is asked to. Its thread ends with it."""

    def __init__(self, kv: KVCache) -> None:
        self._kv = kv
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-copies")
        self._under_way: set[Future[float]] = set()

    def submit(self, moves: Sequence[Move]) -> CopyTicket:
        future = self._thread.submit(self._copy, moves)
        self._under_way = {other for other in self._under_way if not other.done()} | {future}
        return CopyTicket(future)

    def wait(self) -> None:
        wait(self._under_way, return_when=FIRST_COMPLETED)

    def _copy(self, moves: Sequence[Move]) -> float:
        began = time.perf_counter()
        try:
            self._kv.move(moves)
        except Exception:
            log.exception("%d blocks were not copied", len(moves))
            raise
        return time.perf_counter() - began
