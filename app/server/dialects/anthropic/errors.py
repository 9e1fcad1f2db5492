"""Errors in Anthropic's format: an object of type "error" that contains an object with a type and a message."""

from typing import Final

from msgspec import Struct

from app.server.http.endpoint import ErrorFormat
from app.server.http.errors import CONTEXT_EXCEEDED, ContextExceeded, InvalidRequest, client_message, http_status

# Types for other statuses: the first for those below 500, the second for those from 500 on.
_REFUSED, _FAILED = "invalid_request_error", "api_error"
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_TOO_LONG: Final = "prompt is too long: "


class MessagesErrorDetail(Struct):
    type: str
    message: str


class MessagesError(Struct, tag_field="type", tag="error"):
    """The body of an error, and the last event of a stream that failed."""

    error: MessagesErrorDetail


def error_body(error: Exception) -> MessagesError:
    """Return the body for `error`."""
    status = http_status(error)
    kind = _KINDS.get(status, _REFUSED if status < 500 else _FAILED)
    return MessagesError(MessagesErrorDetail(kind, _message(error)))


def _message(error: Exception) -> str:
    """Return the message. A prompt that is too long gets Anthropic's phrase, by which clients know to shorten it."""
    if isinstance(error, ContextExceeded):
        numbers = f"{error.prompt_tokens} tokens > {error.context_length} maximum"
        return f"{_TOO_LONG}{numbers}. {error.remedy}".strip()
    prefix = _TOO_LONG if isinstance(error, InvalidRequest) and error.code == CONTEXT_EXCEEDED else ""
    return prefix + client_message(error)


ERRORS: Final = ErrorFormat(error_body, MessagesError)
