"""Errors in Ollama's format: an object with a single string."""

from msgspec import Struct

from app.server.http.endpoint import ErrorFormat
from app.server.http.errors import CONTEXT_EXCEEDED, ContextExceeded, InvalidRequest, bounded, client_message


class ErrorBody(Struct, rename={"message": "error"}):
    message: str


def error_body(error: Exception) -> ErrorBody:
    """Return the body for `error`."""
    if isinstance(error, ContextExceeded):  # clients match this phrase
        numbers = f"{error.prompt_tokens} tokens, and the context holds {error.context_length}"
        return ErrorBody(f"prompt too long; exceeded max context length: {numbers}. {error.remedy}")
    # an input of an embedding request is too long
    if isinstance(error, InvalidRequest) and error.code == CONTEXT_EXCEEDED:
        remedy = "Send shorter inputs, or set truncate to true."
        return ErrorBody(f"the input length exceeds the context length: {bounded(error.message)}. {remedy}")
    return ErrorBody(bounded(client_message(error)))


ERRORS = ErrorFormat(error_body, ErrorBody)
