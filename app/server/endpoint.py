"""A route that says of itself what it takes and gives, so that a description of all routes is made of the routes."""

from collections.abc import Awaitable, Callable
from typing import Any, Final, Literal

from msgspec import Struct
from starlette.requests import Request
from starlette.routing import Route

TEXT: Final = "text/plain"


class Endpoint(Route):
    """One method of one path. Where `gives` is None, it never succeeds: it says why."""

    def __init__(
        self,
        method: Literal["GET", "POST"],
        path: str,
        answer: Callable[[Request], Awaitable[Any]],
        summary: str,
        *,
        takes: type[Struct] | None = None,
        gives: type[Struct] | Literal["text/plain"] | None = None,
        streams: type[Struct] | None = None,
        fails_with: type[Struct] | None = None,
    ) -> None:
        """`takes` is the body of a request, `gives` that of a whole reply, `streams` the data of each event of a
        streamed one; `fails_with` what a server that cannot serve answers with, where it is not an error's body."""
        super().__init__(path, answer, methods=[method])
        self.method = method
        self.summary = summary
        self.takes = takes
        self.gives = gives
        self.streams = streams
        self.fails_with = fails_with
