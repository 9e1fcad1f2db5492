"""Errors in OpenAI's format: an object with message, type, param, and code."""

from typing import Final

from msgspec import UNSET, Struct, UnsetType

from app.server.http.endpoint import ErrorFormat
from app.server.http.errors import ContextExceeded, InvalidRequest, bounded, client_message, error_code, http_status
from engine.errors import InvalidSampling

_KINDS = {429: "rate_limit_error"}


class ErrorDetail(Struct):
    message: str
    type: str
    param: str | None
    code: str | None
    n_prompt_tokens: int | UnsetType = UNSET  # llama.cpp's field, set for a prompt that is too long, like the next one
    n_ctx: int | UnsetType = UNSET


class ErrorBody(Struct):
    error: ErrorDetail


def error_body(error: Exception) -> ErrorBody:
    """Return the body for `error`."""
    status = http_status(error)
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    detail = ErrorDetail(client_message(error), kind, _parameter(error), _code(error))
    if isinstance(error, ContextExceeded):
        detail.message, detail.n_prompt_tokens, detail.n_ctx = (
            _too_long(error),
            error.prompt_tokens,
            error.context_length,
        )
    return ErrorBody(detail)


def _too_long(error: ContextExceeded) -> str:
    """Return OpenAI's sentence for a prompt that is too long. Most clients recognize the error by it.

    LangChain looks for the words after the comma.
    """
    field, length = error.parameter.partition(".")[0] or "prompt", error.context_length
    count = f"{'' if error.too_long.is_exact else 'more than '}{error.prompt_tokens}"
    return (
        f"This model's maximum context length is {length} tokens. "
        f"However, your {field} resulted in {count} tokens, so the prompt is too long. {error.remedy}"
    )


def _parameter(error: Exception) -> str | None:
    return bounded(error.parameter) or None if isinstance(error, InvalidRequest | InvalidSampling) else None


def _code(error: Exception) -> str | None:
    return error_code(error) or None


ERRORS: Final = ErrorFormat(error_body, ErrorBody)
