"""How the pieces of a streamed reply stand in the body of a response: server-sent events, or lines of JSON."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec


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
