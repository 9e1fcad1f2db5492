"""A route that says of itself what it takes and gives, so that a description of all routes is made of the routes."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

from msgspec import Struct
from starlette.requests import Request
from starlette.routing import Route

from app.server.framing import EVENTS, Framing

TEXT: Final = "text/plain"


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """How a dialect writes errors."""

    body: Callable[[Exception], Struct]
    type: type[Struct]  # of that body


class Endpoint(Route):
    """One method of one path. Where `gives` is None, it never succeeds: it says why."""

    def __init__(
        self,
        method: Literal["GET", "POST", "DELETE"],
        path: str,
        answer: Callable[[Request], Awaitable[Any]],
        summary: str,
        *,
        takes: type[Struct] | None = None,
        gives: Any = None,
        streams: Any = None,
        fails_with: type[Struct] | None = None,
        framing: Framing = EVENTS,
        errors: ErrorShape | None = None,
    ) -> None:
        """`takes` is the body of a request, `gives` that of a whole reply (a type, a union, or TEXT), `streams` the
        pieces of a streamed one in their `framing`, a type or a union; `fails_with` what a server that cannot serve
        answers with, where it is not an error's body. `errors` is how those are written, where that is not as
        everywhere."""
        super().__init__(path, answer, methods=[method])
        self.method = method
        self.summary = summary
        self.takes = takes
        self.gives = gives
        self.streams = streams
        self.fails_with = fails_with
        self.framing = framing
        self.errors = errors
