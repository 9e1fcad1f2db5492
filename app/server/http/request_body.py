"""Decoding of request bodies: size, media type, JSON, types, and bounds are checked in this order.

The type of the body declares the fields and their bounds.
"""

import asyncio
import re
from typing import Protocol, TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request

from app.server.http.errors import InvalidRequest, bounded
from app.server.http.seen import note_body

MAX_BODY_BYTES = 10 << 20
# Longer bodies are received and dropped up to this size: most clients read no reply before they have sent everything.
MAX_DROPPED_BYTES = 64 << 20

# Seconds for a body, plus one second for each MIN_BYTES_PER_SECOND bytes.
BODY_SECONDS = 20.0
MIN_BYTES_PER_SECOND = 64 << 10

# Limits on the JSON outside of strings. They bound the time to decode a body, during which other requests wait.
MAX_CONTAINERS = 1 << 14  # objects and lists
MAX_VALUES = 1 << 18
MAX_DEPTH = 100
# Longer bodies are decoded on a thread.
_SHORT_BODY = 64 << 10
_PIECE = 512 << 10

BodyT = TypeVar("BodyT", bound=msgspec.Struct)
DecodedT_co = TypeVar("DecodedT_co", covariant=True)


class Decoder(Protocol[DecodedT_co]):
    """Decodes a body: msgspec's decoder, or a `FieldTable`."""

    def decode(self, body: bytes, /) -> DecodedT_co: ...


# Media types of clients that do not choose one: curl and urllib call any body a form.
_DEFAULT_TYPES = frozenset(("", "application/x-www-form-urlencoded", "text/plain"))

_NO_BRACKETS = bytes(set(range(256)) - set(b"{[]}"))
_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`\Z")
_MISSING = re.compile(r"Object missing required field `([^`]*)`")


async def read_body(request: Request, decoder: Decoder[BodyT]) -> BodyT:
    """Return the decoded body. Raises InvalidRequest naming the invalid field, and Starlette's ClientDisconnect."""
    body = await receive_body(request)
    note_body(request, body)
    _check_encoding(request.headers)
    _check_media_type(request.headers)
    return (
        decode_bounded(body, decoder)
        if len(body) <= _SHORT_BODY
        else await asyncio.to_thread(decode_bounded, body, decoder)
    )


def _check_encoding(headers: Headers) -> None:
    """Raise InvalidRequest for a compressed body."""
    encoding = headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise InvalidRequest(
            f"The body's Content-Encoding is {bounded(encoding)!r}",
            "Send the body without compression.",
            status=415,
            headers={"accept-encoding": "identity"},
        )


def _check_media_type(headers: Headers) -> None:
    """Raise InvalidRequest for a body that is not declared as JSON.

    A web page can make a browser send the `_DEFAULT_TYPES` without asking the server first. Browsers then send an
    Origin header. Other programs do not, and many of them set no type.
    """
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type == "application/json" or (media_type in _DEFAULT_TYPES and "origin" not in headers):
        return
    problem = f"The body's type is {media_type or 'not given'!r}"
    raise InvalidRequest(problem, "Send Content-Type: application/json.", status=415)


async def receive_body(request: Request) -> bytes:
    """Return the body. Raises InvalidRequest if it is large or slow, and Starlette's ClientDisconnect."""
    pieces: list[bytes] = []
    size, started = 0, asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(BODY_SECONDS) as deadline:
            async for piece in request.stream():
                size += len(piece)
                deadline.reschedule(started + BODY_SECONDS + size / MIN_BYTES_PER_SECOND)
                if size <= MAX_BODY_BYTES:
                    pieces.append(piece)
                elif size > MAX_DROPPED_BYTES:
                    break
    except TimeoutError:
        raise InvalidRequest(
            f"The body arrives slower than {MIN_BYTES_PER_SECOND:,} bytes per second", "Send it faster.", status=408
        ) from None
    if size > MAX_BODY_BYTES:
        raise InvalidRequest(f"The body is longer than {MAX_BODY_BYTES:,} bytes", "Send less.", status=413)
    return b"".join(pieces)


def decode_bounded(body: bytes, decoder: Decoder[BodyT]) -> BodyT:
    """Check the limits of a body, then decode it. Raises InvalidRequest."""
    if not _is_simple(body):
        structure = _without_strings(body)
        if structure is None or _containers(structure) > MAX_CONTAINERS or _count(structure, b",") > MAX_VALUES:
            problem = f"The body has more than {MAX_CONTAINERS:,} objects and lists, or {MAX_VALUES:,} values"
            raise InvalidRequest(problem, "Send several requests.")
        if _depth(structure) > MAX_DEPTH:
            raise InvalidRequest(f"The body is nested deeper than {MAX_DEPTH} levels", "Send fewer levels.")
    return decode(body, decoder)


def _is_simple(body: bytes) -> bool:
    """Whether the limits hold even if characters in strings are counted."""
    return _containers(body) <= MAX_DEPTH and _count(body, b",") <= MAX_VALUES


def _containers(text: bytes) -> int:
    return _count(text, b"{") + _count(text, b"[")


def _count(text: bytes, byte: bytes) -> int:
    """Count a byte in pieces of the body, so that other threads can run in between."""
    return sum(text.count(byte, start, start + _PIECE) for start in range(0, len(text), _PIECE))


def _depth(text: bytes) -> int:
    """Return how deeply objects and lists are nested. `text` must contain no strings."""
    depth = deepest = 0
    for bracket in text.translate(None, _NO_BRACKETS):
        depth += 1 if bracket in b"{[" else -1
        deepest = max(deepest, depth)
    return deepest


def _without_strings(body: bytes) -> bytes | None:
    """Return JSON without its strings, or None if there are too many."""
    if b"\\" in body:  # escapes are read from the left
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if _count(body, b'"') > 2 * MAX_VALUES:
        return None
    return b"".join(body.split(b'"')[::2])


def decode(body: bytes, decoder: Decoder[BodyT]) -> BodyT:
    """Decode `body`. Raises InvalidRequest naming the invalid field."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        parameter, problem = _field_and_problem(str(error))
        raise InvalidRequest(f"{parameter or 'The body'}: {problem}", parameter=parameter) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The body is not JSON: {error}", "Send one JSON object in UTF-8.") from error
    except RecursionError as error:
        raise InvalidRequest("The body is nested too deeply", "Send fewer levels of arrays and objects.") from error


def _field_and_problem(message: str) -> tuple[str, str]:
    """Split a message of msgspec into the path of the field, such as `messages[0].role`, and the problem."""
    location = _PATH.search(message)
    path = location[1].replace("[...]", "") if location else ""
    problem = message[: location.start()] if location else message
    if missing := _MISSING.match(problem):
        return f"{path}.{missing[1]}".lstrip("."), "it is required"
    return path, problem
