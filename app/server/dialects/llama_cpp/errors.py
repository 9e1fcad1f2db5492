"""Errors as llama.cpp's server writes them: one object with the status, a message and a type."""

from collections.abc import Mapping

from msgspec import Struct

from app.server.endpoint import ErrorShape
from app.server.errors import bounded, status_of, text_of_error

_KINDS: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    501: "not_supported_error",
    503: "unavailable_error",
}


class ErrorDetail(Struct):
    code: int
    message: str
    type: str


class ErrorBody(Struct):
    error: ErrorDetail


def error_body(error: Exception) -> ErrorBody:
    """What a client is told about `error`."""
    status = status_of(error)
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return ErrorBody(ErrorDetail(status, bounded(text_of_error(error)), kind))


ERRORS = ErrorShape(error_body, ErrorBody)
