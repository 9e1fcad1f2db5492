"""Retries of network requests: the number of attempts, and the waits between them.

An operation that makes progress is retried without limit; one without progress fails after a few attempts. If a server
states when it will be ready, that wait is used.
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

WAITS = (0.2, 1.0, 3.0, 10.0, 30.0, 60.0)  # seconds after the first failed attempt, the second, ...
SHORT_WAITS = WAITS[:3]  # waits of requests whose result the user waits for
LONGEST_WAIT = 300.0  # seconds that a server may ask to wait
_BUSY = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS)
_QUIET_SECONDS = 2.0  # longest wait in seconds that is not reported


class TryAgain(Exception):
    """An attempt failed for now.

    `reason` is the error to raise after the last attempt. `wait` is the number of seconds that the server asks for.
    """

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
    """Return the result of the first attempt that does not raise TryAgain.

    `amount` returns the progress of all attempts together; an attempt that made progress resets the count of failures.
    `say` receives a line before a long wait. Raises the reason of the last attempt when the attempts are used up.
    """
    waits = WAITS if waits is None else waits
    failures, before = 0, amount()
    while True:
        try:
            return await attempt()
        except TryAgain as problem:
            failures = 1 if amount() > before else failures + 1
            before = amount()
            if failures > len(waits) or (problem.wait or 0.0) > LONGEST_WAIT:
                raise problem.reason from problem
            wait = waits[failures - 1] * random.uniform(0.8, 1.2) if problem.wait is None else problem.wait  # noqa: S311
            if wait > _QUIET_SECONDS:
                say(f"{problem}. Retrying in {wait:.0f} s.")
            await asyncio.sleep(wait)


def is_busy(status: int) -> bool:
    """Whether a request that got this status may succeed if it is repeated."""
    return status >= HTTPStatus.INTERNAL_SERVER_ERROR or status in _BUSY


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds in the Retry-After header (RFC 9110, section 10.2.3); None if it is missing or invalid."""
    text = headers.get("Retry-After", "").strip()
    if text.isascii() and text.isdecimal() and len(text) < 10:
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None
