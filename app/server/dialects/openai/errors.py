"""Errors as OpenAI's API writes them: one JSON object with message, type, param and code."""

from msgspec import Struct

from app.server.errors import InvalidRequest, bounded, status_of, text_of_error
from engine.errors import InvalidSampling

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
    return ErrorBody(ErrorDetail(text_of_error(error), kind, _parameter(error), _code(error)))


def _parameter(error: Exception) -> str | None:
    return bounded(error.parameter) or None if isinstance(error, InvalidRequest | InvalidSampling) else None


def _code(error: Exception) -> str | None:
    return error.code or None if isinstance(error, InvalidRequest) else None
