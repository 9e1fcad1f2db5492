"""Errors as Ollama writes them: one text."""

from msgspec import Struct

from app.server.http.endpoint import ErrorFormat
from app.server.http.errors import CONTEXT_EXCEEDED, ContextExceeded, InvalidRequest, bounded, client_message


class ErrorBody(Struct, rename={"message": "error"}):
    message: str


def error_body(error: Exception) -> ErrorBody:
    """What a client is told about `error`."""
    if isinstance(error, ContextExceeded):  # clients know the phrase by heart
        numbers = f"{error.prompt_tokens} tokens, and the context holds {error.context_length}"
        return ErrorBody(f"prompt too long; exceeded max context length: {numbers}. {error.remedy}")
    if isinstance(error, InvalidRequest) and error.code == CONTEXT_EXCEEDED:  # a text without a reply
        remedy = "Send it in pieces, or have it cut with truncate."
        return ErrorBody(f"the input length exceeds the context length: {bounded(error.message)}. {remedy}")
    return ErrorBody(bounded(client_message(error)))


ERRORS = ErrorFormat(error_body, ErrorBody)
