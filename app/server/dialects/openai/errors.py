"""Errors as OpenAI's API writes them: one JSON object with message, type, param and code."""

from collections.abc import Callable

import msgspec
from msgspec import Struct
from starlette.responses import Response

from app.server.errors import InvalidRequest, status_of, text_of_error
from engine.errors import InvalidSampling

MAX_TEXT = 1000  # characters of a message
_KINDS = {429: "rate_limit_error"}


class ErrorDetail(Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Struct):
    error: ErrorDetail


def error_body(error: Exception) -> ErrorBody:
    """What a client is told about `error`."""
    status = status_of(error)
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return ErrorBody(ErrorDetail(_bounded(text_of_error(error)), kind, _parameter(error), _code(error)))


def error_response(error: Exception, body_of: Callable[[Exception], Struct] = error_body) -> Response:
    """The whole response to a request that ended with `error` before anything was sent; `body_of` writes it."""
    body = msgspec.json.encode(body_of(error))
    headers = error.headers if isinstance(error, InvalidRequest) else None
    return Response(body, status_of(error), headers, media_type="application/json")


def _bounded(text: str) -> str:
    """What was sent is named in errors, however long it was."""
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT // 2]} ... {text[-MAX_TEXT // 2 :]}"


def _parameter(error: Exception) -> str | None:
    return _bounded(error.parameter) or None if isinstance(error, InvalidRequest | InvalidSampling) else None


def _code(error: Exception) -> str | None:
    return error.code or None if isinstance(error, InvalidRequest) else None
