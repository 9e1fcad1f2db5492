"""An endpoint as data (path, handler, types), and the framing of its streams: server-sent events or lines of JSON."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.routing import Route


@dataclass(frozen=True, slots=True)
class Framing:
    """One way."""

    media_type: str
    frame: Callable[[Any], bytes]  # of anything that becomes JSON; NAMED_EVENTS take tagged structs
    end: bytes  # behind the last piece, where nothing failed
    # What clients that wait are sent, given what their request is doing; nothing where they would read it.
    ping: Callable[[str], bytes]


def _event(piece: Any) -> bytes:
    return b"data: " + msgspec.json.encode(piece) + b"\n\n"


def _named_event(piece: msgspec.Struct) -> bytes:
    return f"event: {piece.__struct_config__.tag}\n".encode() + _event(piece)


def _comment(status: str) -> bytes:
    """An event without data, which clients pass over."""
    return f": {status}\n\n".encode()


def _line(piece: msgspec.Struct) -> bytes:
    return msgspec.json.encode(piece) + b"\n"


_EVENTS = "text/event-stream; charset=utf-8"

EVENTS = Framing(_EVENTS, _event, b"data: [DONE]\n\n", _comment)
BARE_EVENTS = Framing(_EVENTS, _event, b"", _comment)  # without an event for the end
# Each event goes by the tag of its type, which is in its data as well.
NAMED_EVENTS = Framing(_EVENTS, _named_event, b"", _comment)
LINES = Framing("application/x-ndjson", _line, b"", lambda status: b"")


TEXT: Final = "text/plain"


@dataclass(frozen=True, slots=True)
class ErrorFormat:
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
        errors: ErrorFormat | None = None,
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
