"""Errors in the format of llama.cpp's server: an object with the status, a message, and a type."""

from collections.abc import Mapping

from msgspec import UNSET, Struct, UnsetType

from app.server.http.endpoint import ErrorFormat
from app.server.http.errors import ContextExceeded, bounded, client_message, http_status

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
    n_prompt_tokens: int | UnsetType = UNSET  # set if a prompt is too long, like the next field
    n_ctx: int | UnsetType = UNSET


class ErrorBody(Struct):
    error: ErrorDetail


def error_body(error: Exception) -> ErrorBody:
    """Return the body for `error`."""
    if isinstance(error, ContextExceeded):
        return ErrorBody(_context_exceeded(error))
    status = http_status(error)
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return ErrorBody(ErrorDetail(status, bounded(client_message(error)), kind))


def _context_exceeded(error: ContextExceeded) -> ErrorDetail:
    """Return the error for a prompt that is too long. Clients match this sentence and read the numbers."""
    prompt, context = error.prompt_tokens, error.context_length
    message = f"The request ({prompt} tokens) exceeds the available context size ({context} tokens). {error.remedy}"
    return ErrorDetail(error.status, message, "exceed_context_size_error", prompt, context)


ERRORS = ErrorFormat(error_body, ErrorBody)
