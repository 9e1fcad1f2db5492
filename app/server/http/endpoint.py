"""An endpoint as data (path, handler, types), and the framing of its streams: server-sent events or lines of JSON."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send


@dataclass(frozen=True, slots=True)
class Framing:
    """The format in which the chunks of a stream are written."""

    media_type: str
    frame: Callable[[Any], bytes]  # encodes one chunk; NAMED_EVENTS needs tagged structs
    end: bytes  # sent after the last chunk if nothing failed
    # Bytes for a client that waits for the next chunk, given the status of its request. Empty if clients would show
    # them.
    ping: Callable[[str], bytes]
    failure: Callable[[msgspec.Raw], bytes]  # frames an encoded error that ends a stream


def _event(piece: Any) -> bytes:
    return b"data: " + msgspec.json.encode(piece) + b"\n\n"


def _named_event(piece: msgspec.Struct) -> bytes:
    return f"event: {piece.__struct_config__.tag}\n".encode() + _event(piece)


def _error_event(error: msgspec.Raw) -> bytes:
    return b"event: error\n" + _event(error)


def _comment(status: str) -> bytes:
    """Return an event without data, which clients ignore."""
    return f": {status}\n\n".encode()


def _line(piece: Any) -> bytes:
    return msgspec.json.encode(piece) + b"\n"


_EVENTS = "text/event-stream; charset=utf-8"

EVENTS = Framing(_EVENTS, _event, b"data: [DONE]\n\n", _comment, _event)
BARE_EVENTS = Framing(_EVENTS, _event, b"", _comment, _event)  # no event marks the end
# The name of each event is the tag of its type, which is also in its data.
NAMED_EVENTS = Framing(_EVENTS, _named_event, b"", _comment, _error_event)
LINES = Framing("application/x-ndjson", _line, b"", lambda status: b"", _line)


TEXT: Final = "text/plain"
_FRAMING: Final = "inglenook.framing"  # key in an ASGI scope of the framing of the endpoint's streams


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

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[_FRAMING] = self.framing
        await super().handle(scope, receive, send)


def framing_of(scope: Scope) -> Framing:
    """Return the framing of the streams of a request's endpoint."""
    framing: Framing = scope[_FRAMING]
    return framing
