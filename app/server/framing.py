"""How the pieces of a streamed reply stand in the body of a response: server-sent events, or lines of JSON."""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, slots=True)
class Framing:
    """One way."""

    media_type: str
    frame: Callable[[msgspec.Struct], bytes]
    end: bytes  # behind the last piece, where nothing failed
    ping: bytes  # what clients that wait for bytes are sent, and read nothing of; none, where they would


def _event(piece: msgspec.Struct) -> bytes:
    return b"data: " + msgspec.json.encode(piece) + b"\n\n"


def _named_event(piece: msgspec.Struct) -> bytes:
    return f"event: {piece.__struct_config__.tag}\n".encode() + _event(piece)


def _line(piece: msgspec.Struct) -> bytes:
    return msgspec.json.encode(piece) + b"\n"


def comment(text: str) -> bytes:
    """A line that readers of events pass over."""
    return f": {text}\n\n".encode()


_EVENTS = "text/event-stream; charset=utf-8"

_COMMENT = comment("waiting")

EVENTS = Framing(_EVENTS, _event, b"data: [DONE]\n\n", _COMMENT)
BARE_EVENTS = Framing(_EVENTS, _event, b"", _COMMENT)  # without an event for the end
# Each event goes by the tag of its type, which is in its data as well.
NAMED_EVENTS = Framing(_EVENTS, _named_event, b"", _COMMENT)
LINES = Framing("application/x-ndjson", _line, b"", b"")
