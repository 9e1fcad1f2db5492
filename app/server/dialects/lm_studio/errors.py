"""Errors in the format of LM Studio's own API: an object with a type, a message, a code, and a parameter."""

from collections.abc import Mapping
from typing import Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType

from app.server.dialects.openai.errors import error_body as openai_body
from app.server.http.endpoint import ErrorFormat
from app.server.http.errors import http_status

Kind: TypeAlias = Literal["invalid_request", "model_not_found", "not_implemented", "internal_error"]

_KINDS: Mapping[int, Kind] = {404: "model_not_found", 501: "not_implemented"}


class ErrorDetail(Struct, kw_only=True):
    type: Kind
    message: str
    code: str | UnsetType = UNSET
    param: str | UnsetType = UNSET


class ErrorBody(Struct):
    error: ErrorDetail


def error_body(error: Exception) -> ErrorBody:
    """Return the body for `error`. The message names the field context_length instead of num_ctx."""
    status, written = http_status(error), openai_body(error).error
    kind = _KINDS.get(status, "invalid_request" if status < 500 else "internal_error")
    message = written.message.replace("num_ctx", "context_length")
    detail = ErrorDetail(type=kind, message=message, code=written.code or UNSET, param=written.param or UNSET)
    return ErrorBody(detail)


ERRORS = ErrorFormat(error_body, ErrorBody)
