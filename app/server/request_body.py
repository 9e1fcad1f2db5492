"""From the body of a request to a checked message: size, media type, JSON, types and bounds, in this order.

The fields and their bounds are declared where the message's type is. Nothing here knows a dialect.
"""

import asyncio
import re
from typing import TypeVar

import msgspec
from starlette.requests import Request

from app.server.errors import InvalidRequest

MAX_BODY_BYTES = 10 << 20
# Read and dropped, since most clients see no answer before they have sent everything.
MAX_DROPPED_BYTES = 64 << 20

# A body may come in so many seconds, and one more for each time as many bytes as this.
BODY_SECONDS = 20.0
LEAST_RATE = 64 << 10

BodyT = TypeVar("BodyT", bound=msgspec.Struct)

_PLACE = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`\Z")
_MISSING = re.compile(r"Object missing required field `([^`]*)`")


async def read_body(request: Request, decoder: "msgspec.json.Decoder[BodyT]") -> BodyT:
    """The request's message. Raises InvalidRequest naming the field at fault, and Starlette's ClientDisconnect."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    body = await _bounded_body(request)
    if media_type != "application/json":
        raise InvalidRequest(
            f"The body's type is {media_type or 'not given'!r}", "Send Content-Type: application/json.", status=415
        )
    return decode(body, decoder)


async def _bounded_body(request: Request) -> bytes:
    pieces: list[bytes] = []
    size, began = 0, asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(BODY_SECONDS) as deadline:
            async for piece in request.stream():
                size += len(piece)
                deadline.reschedule(began + BODY_SECONDS + size / LEAST_RATE)
                if size <= MAX_BODY_BYTES:
                    pieces.append(piece)
                elif size > MAX_DROPPED_BYTES:
                    break
    except TimeoutError:
        raise InvalidRequest("The body takes too long to come", "Send it faster.", status=408) from None
    if size > MAX_BODY_BYTES:
        raise InvalidRequest(f"The body is longer than {MAX_BODY_BYTES:,} bytes", "Send less.", status=413)
    return b"".join(pieces)


def decode(body: bytes, decoder: "msgspec.json.Decoder[BodyT]") -> BodyT:
    """`body` as the decoder's type. Raises InvalidRequest naming the field at fault."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        parameter, problem = _fault(str(error))
        raise InvalidRequest(f"{parameter or 'The body'}: {problem}", parameter=parameter) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The body is not JSON: {error}", "Send one JSON object in UTF-8.") from error
    except RecursionError as error:
        raise InvalidRequest("The body is nested too deeply", "Send fewer levels of arrays and objects.") from error


def _fault(message: str) -> tuple[str, str]:
    """The field at fault, as a path such as `messages[0].role`, and what is wrong with it."""
    place = _PLACE.search(message)
    path = place[1].replace("[...]", "") if place else ""
    problem = message[: place.start()] if place else message
    if missing := _MISSING.match(problem):
        return f"{path}.{missing[1]}".lstrip("."), "it is required"
    return path, problem
