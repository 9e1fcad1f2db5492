"""Errors as Ollama writes them: one text."""

from msgspec import Struct

from app.server.endpoint import ErrorShape
from app.server.errors import bounded, text_of_error


class ErrorBody(Struct, rename={"message": "error"}):
    message: str


def error_body(error: Exception) -> ErrorBody:
    """What a client is told about `error`."""
    return ErrorBody(bounded(text_of_error(error)))


ERRORS = ErrorShape(error_body, ErrorBody)
