"""When memory that only refers to itself is looked for: while the screens have nothing to do.

A whole look takes tenths of a second, in which no key is heard, and Python takes one whenever much has been made, which
is while a reply comes. Knows nothing of the screens.
"""

import asyncio
import gc
from time import process_time

_YOUNG = (700, 10)  # what was made lately is looked at so often that it takes milliseconds
_NEVER = 1 << 30
_PAUSE = 2.0  # seconds
_QUIET = 0.05  # share of a core that is used at most in a pause that counts as quiet
_WORK = 1.0  # seconds of a core, from which on there is something to look for


class IdleCollector:
    """What has been done since it was tidy."""

    def __init__(self, spent: float) -> None:
        """`spent`: seconds of a core, as at each look."""
        self._before = spent
        self._tidy_at = spent - _WORK
        self._is_first = True

    def poll(self, spent: float) -> bool:
        """Tidy up, if there is quiet and something to do; whether it was done."""
        is_quiet = spent - self._before <= _QUIET * _PAUSE
        self._before = spent
        if not is_quiet or spent - self._tidy_at < _WORK:
            return False
        gc.collect()
        if self._is_first:  # what is there by now stays: later looks pass over it
            gc.freeze()
            self._is_first = False
        self._tidy_at = spent
        return True


async def collect_when_idle() -> None:
    """Tidy up in quiet moments, for as long as this runs."""
    before = gc.get_threshold()
    gc.set_threshold(*_YOUNG, _NEVER)
    tidying = IdleCollector(process_time())
    try:
        while True:
            await asyncio.sleep(_PAUSE)
            tidying.poll(process_time())
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
