"""How many requests one caller may have under way, so that no program takes the whole server for itself.

Refuses to know what the requests are for.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from app.server.errors import InvalidRequest
from app.server.http.access import Caller

RETRY_SECONDS = 5


class RequestLimits:
    """Counts the requests under way, by caller."""

    def __init__(self, most: int) -> None:
        """`most` of one caller at a time; 0: any number."""
        self._most = most
        self._under_way: Counter[str] = Counter()

    @contextmanager
    def counted(self, caller: Caller, method: str) -> Iterator[None]:
        """Count a request while the body runs, if it is one that work is done for. Raises InvalidRequest where there
        are enough already."""
        if method != "POST":
            yield
            return
        if self._most and self._under_way[caller.name] >= self._most:
            raise InvalidRequest(
                f"{self._most} requests of this API key are under way, and no more are taken",
                f"Send it again in {RETRY_SECONDS} seconds, or raise max_requests.",
                code="rate_limit_exceeded",
                status=429,
                headers={"retry-after": str(RETRY_SECONDS)},
            )
        self._under_way[caller.name] += 1
        try:
            yield
        finally:
            self._under_way[caller.name] -= 1
            if not self._under_way[caller.name]:
                del self._under_way[caller.name]
