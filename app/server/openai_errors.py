"""Errors as OpenAI's API writes them: one JSON object with message, type, param and code."""

from collections.abc import Mapping

import msgspec
from msgspec import Struct
from starlette.responses import Response

from app.server.errors import InvalidRequest, status_of, text_of_error
from engine.errors import InvalidSampling


class ErrorDetail(Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Struct):
    error: ErrorDetail


def error_body(error: Exception) -> ErrorBody:
    """What a client is told about `error`."""
    kind = "invalid_request_error" if status_of(error) < 500 else "server_error"
    return ErrorBody(ErrorDetail(text_of_error(error), kind, _parameter(error), _code(error)))


def error_response(error: Exception, headers: Mapping[str, str] | None = None) -> Response:
    """The whole response to a request that ended with `error` before anything was sent."""
    body = msgspec.json.encode(error_body(error))
    return Response(body, status_of(error), headers, media_type="application/json")


def _parameter(error: Exception) -> str | None:
    return error.parameter or None if isinstance(error, InvalidRequest | InvalidSampling) else None


def _code(error: Exception) -> str | None:
    return error.code or None if isinstance(error, InvalidRequest) else None
