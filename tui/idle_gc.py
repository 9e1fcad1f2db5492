"""Runs Python's full garbage collection while the chat is idle.

A full collection takes tenths of a second, during which no key is processed. By default, Python runs it after many
allocations, and thus while a reply streams.
"""

import asyncio
import gc
from time import process_time

_YOUNG = (700, 10)  # thresholds of the two young generations, whose collections take milliseconds
_NEVER = 1 << 30
_PAUSE = 2.0  # seconds between two polls
_QUIET = 0.05  # the process is idle if it used less than this fraction of a core since the last poll
_WORK = 1.0  # CPU seconds that must be used before the next collection


class IdleCollector:
    """Decides when to collect, from the CPU time that the process has used."""

    def __init__(self, spent: float) -> None:
        """Start with `spent`, the CPU seconds that the process has used, as in `poll`."""
        self._before = spent
        self._tidy_at = spent - _WORK
        self._has_frozen = False

    def poll(self, spent: float) -> bool:
        """Collect garbage if the process was idle since the last poll and has used enough CPU time before.

        Returns whether it collected.
        """
        is_quiet = spent - self._before <= _QUIET * _PAUSE
        self._before = spent
        if not is_quiet or spent - self._tidy_at < _WORK:
            return False
        gc.collect()
        if not self._has_frozen:  # most objects that exist by then stay alive: later collections skip them
            gc.freeze()
            self._has_frozen = True
        self._tidy_at = spent
        return True

    def close(self) -> None:
        """Make later collections visit all objects again, if a poll has excluded them."""
        if self._has_frozen:
            gc.unfreeze()


async def collect_when_idle() -> None:
    """Collect garbage whenever the process is idle, until this task is cancelled."""
    before = gc.get_threshold()
    gc.set_threshold(*_YOUNG, _NEVER)
    tidying = IdleCollector(process_time())
    try:
        while True:
            await asyncio.sleep(_PAUSE)
            tidying.poll(process_time())
    finally:
        gc.set_threshold(*before)
        tidying.close()
