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
    """The format in which the chunks of a stream are written."""

    media_type: str
    frame: Callable[[Any], bytes]  # encodes one chunk; NAMED_EVENTS needs tagged structs
    end: bytes  # sent after the last chunk if nothing failed
    # Bytes for a client that waits for the next chunk, given the status of its request. Empty if clients would show
    # them.
    ping: Callable[[str], bytes]


def _event(piece: Any) -> bytes:
    return b"data: " + msgspec.json.encode(piece) + b"\n\n"


def _named_event(piece: msgspec.Struct) -> bytes:
    return f"event: {piece.__struct_config__.tag}\n".encode() + _event(piece)


def _comment(status: str) -> bytes:
    """Return an event without data, which clients ignore."""
    return f": {status}\n\n".encode()


def _line(piece: msgspec.Struct) -> bytes:
    return msgspec.json.encode(piece) + b"\n"


_EVENTS = "text/event-stream; charset=utf-8"

EVENTS = Framing(_EVENTS, _event, b"data: [DONE]\n\n", _comment)
BARE_EVENTS = Framing(_EVENTS, _event, b"", _comment)  # no event marks the end
# The name of each event is the tag of its type, which is also in its data.
NAMED_EVENTS = Framing(_EVENTS, _named_event, b"", _comment)
LINES = Framing("application/x-ndjson", _line, b"", lambda status: b"")


TEXT: Final = "text/plain"


@dataclass(frozen=True, slots=True)
class ErrorFormat:
    """The format in which a dialect writes errors."""

    body: Callable[[Exception], Struct]
    type: type[Struct]  # type of the body


class Endpoint(Route):
    """One method of one path. If `gives` is None, the endpoint always returns an error."""

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
        """Set the types of an endpoint, for the API description.

        `takes` is the type of the request body. `gives` is the type of a whole reply, a union, or TEXT. `streams` is
        the type of a streamed reply's chunks or a union, sent with `framing`. `fails_with` is the reply with status 503
        if it is not an error. `errors` is the error format if it is not the default.
        """
        super().__init__(path, answer, methods=[method])
        self.method = method
        self.summary = summary
        self.takes = takes
        self.gives = gives
        self.streams = streams
        self.fails_with = fails_with
        self.framing = framing
        self.errors = errors
