"""How often, and how long apart, something on the network is tried again.

What moves on has all the time in the world; what does not is given up after a few attempts. A server that says when it
will be ready is taken at its word. Refuses to know what is tried.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import TypeVar

from app.errors import AppError

T = TypeVar("T")

WAITS = (0.2, 1.0, 3.0, 10.0, 30.0, 60.0)  # seconds after the first attempt in vain, the second, ...
SHORT_WAITS = WAITS[:3]  # for what nobody wants to wait for
LONGEST_WAIT = 300.0  # seconds that a server may ask for
_BUSY = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS)
_SILENTLY = 2.0  # seconds that need no word


class TryAgain(Exception):
    """An attempt failed for now. `reason` is the error once it is given up; `wait` what the server asks for."""

    def __init__(self, reason: AppError, wait: float | None = None) -> None:
        super().__init__(reason.message)
        self.reason = reason
        self.wait = wait


async def retry(
    attempt: Callable[[], Awaitable[T]],
    say: Callable[[str], None],
    *,
    amount: Callable[[], int] = lambda: 0,
    waits: Sequence[float] | None = None,
) -> T:
    """The result of an attempt that does not raise TryAgain.

    `amount` grows with what attempts achieve together: one that achieved something counts as the first in vain. `say`
    takes a line where people have to wait. Raises the reason of the last attempt when there have been enough.
    """
    waits = WAITS if waits is None else waits
    in_vain, before = 0, amount()
    while True:
        try:
            return await attempt()
        except TryAgain as problem:
            in_vain = 1 if amount() > before else in_vain + 1
            before = amount()
            if in_vain > len(waits) or (problem.wait or 0.0) > LONGEST_WAIT:
                raise problem.reason from problem
            wait = waits[in_vain - 1] * random.uniform(0.8, 1.2) if problem.wait is None else problem.wait  # noqa: S311
            if wait > _SILENTLY:
                say(f"{problem}: trying again in {wait:.0f} s.")
            await asyncio.sleep(wait)


def is_busy(status: int) -> bool:
    """Whether another attempt may have another answer."""
    return status >= HTTPStatus.INTERNAL_SERVER_ERROR or status in _BUSY


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds, by the Retry-After of an answer (RFC 9110, section 10.2.3); None where it makes no sense."""
    text = headers.get("Retry-After", "").strip()
    if text.isascii() and text.isdecimal() and len(text) < 10:
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None
