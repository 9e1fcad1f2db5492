"""Errors as Ollama writes them: one text."""

from msgspec import Struct

from app.server.endpoint import ErrorShape
from app.server.errors import ContextExceeded, bounded, text_of_error


class ErrorBody(Struct, rename={"message": "error"}):
    message: str


def error_body(error: Exception) -> ErrorBody:
    """What a client is told about `error`."""
    if isinstance(error, ContextExceeded):  # clients know the phrase by heart
        numbers = f"{error.prompt_tokens} tokens, and the context holds {error.context_length}"
        return ErrorBody(f"prompt too long; exceeded max context length: {numbers}. {error.remedy}")
    return ErrorBody(bounded(text_of_error(error)))


ERRORS = ErrorShape(error_body, ErrorBody)
