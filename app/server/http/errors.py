"""Errors of HTTP requests: their status, their body in the format of a path, and exceptions that no endpoint caught.

Dialects define the formats. Messages and remedies come from the errors themselves.
"""

import contextlib
import logging
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

import msgspec
from msgspec import Struct
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import (
    AppError,
    DownloadStopped,
    GrammarsUnavailable,
    IntegrityError,
    InvalidGrammar,
    ModelNotFound,
    NoSpace,
    Offline,
    ReplyAborted,
    ReplyFailed,
    TemplateError,
    TemplateUnavailable,
    TextTooLong,
    ToolsUnsupported,
)
from app.generation.attachments import AttachmentRefused
from app.generation.conversation import InvalidMessage
from app.models.residency.resident import DoesNotFit, ModelBusy
from app.server.http.endpoint import Endpoint, ErrorFormat
from engine.errors import EngineError, InvalidSampling, PromptTooLong, UnsupportedModel
from quant.errors import InglenookError, ModelFileError

log = logging.getLogger(__name__)

MAX_TEXT = 1000  # characters of a message
CONTEXT_EXCEEDED = "context_length_exceeded"


class InvalidRequest(AppError):
    """A request that cannot be answered.

    `parameter` is the path of the invalid field, or empty. `headers` are those of the response.
    """

    def __init__(
        self,
        message: str,
        remedy: str = "",
        *,
        parameter: str = "",
        code: str = "",
        status: int = 400,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, remedy)
        self.parameter = parameter
        self.code = code
        self.status = status
        self.headers = headers or {}


class ContextExceeded(InvalidRequest):
    """A prompt that does not fit the context.

    `too_long` has the number of tokens, and states whether a larger --context would help.
    """

    def __init__(self, too_long: PromptTooLong, parameter: str) -> None:
        super().__init__(too_long.message, too_long.remedy, parameter=parameter, code=CONTEXT_EXCEEDED)
        self.too_long = too_long

    @property
    def prompt_tokens(self) -> int:
        return self.too_long.tokens

    @property
    def context_length(self) -> int:
        return self.too_long.context


def check_vocabulary(ids: Iterable[int], vocab_size: int, parameter: str, remedy: str = "") -> None:
    """Raise InvalidRequest for a token id that the model does not have."""
    if (largest := max(ids, default=0)) >= vocab_size:
        problem = f"token id {largest} is not in the vocabulary of {vocab_size} tokens"
        raise InvalidRequest(f"{parameter}: {problem}", remedy, parameter=parameter)


# The status of an error is that of its nearest class here; other errors are failures of the server.
_STATUS: dict[type[BaseException], int] = {
    InvalidSampling: 400,
    PromptTooLong: 400,
    TemplateUnavailable: 503,
    GrammarsUnavailable: 503,
    TemplateError: 400,
    InvalidMessage: 400,
    AttachmentRefused: 400,
    TextTooLong: 400,
    ToolsUnsupported: 400,
    ModelNotFound: 404,
    DoesNotFit: 400,
    UnsupportedModel: 400,
    ModelBusy: 503,
    NoSpace: 507,
    Offline: 503,
    DownloadStopped: 409,
    ReplyFailed: 500,
    ReplyAborted: 503,
    EngineError: 503,
}


def http_status(error: Exception) -> int:
    """Return the HTTP status for `error`."""
    if isinstance(error, InvalidRequest):
        return error.status
    return next((_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS), 500)


# Codes by which clients tell errors of the server apart, like those of an `InvalidRequest`.
_CODES: dict[type[BaseException], str] = {ModelNotFound: "model_not_found", DoesNotFit: "model_does_not_fit"}


def error_code(error: Exception) -> str:
    """Return the code of an error; empty if it has none."""
    return error.code if isinstance(error, InvalidRequest) else _CODES.get(type(error), "")


# Errors whose messages contain paths, which clients must not learn: only the last part of a path is sent.
_OF_FILES = (ModelFileError, IntegrityError, UnsupportedModel, ModelNotFound)
_FOLDERS = re.compile(r"(?:(?<=\s)|^)(?:[A-Za-z]:)?[/\\].*[/\\]")


def client_message(error: Exception) -> str:
    """Return the message for the client. For a bug it is generic, since the error may contain anything."""
    if not isinstance(error, InglenookError):
        return "The server failed because of a bug. Its log has the details."
    message, remedy = error.message, error.remedy
    if isinstance(error, _OF_FILES):
        message, remedy = without_folders(message), without_folders(remedy)
    message = message if message.endswith((".", "!", "?")) else f"{message}."
    return bounded(f"{message} {remedy}".strip())


def without_folders(text: str) -> str:
    """Return a text whose paths are reduced to their last part."""
    return _FOLDERS.sub("", text)


def bounded(text: str) -> str:
    """Shorten a text that may quote the request, so that the message stays short."""
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT // 2]} ... {text[-MAX_TEXT // 2 :]}"


def raise_first(problems: Iterable[tuple[str, str]]) -> None:
    """Raise InvalidRequest for the first of `problems`, which are (field, problem) pairs."""
    for parameter, problem in problems:
        raise InvalidRequest(f"{parameter}: {problem}", parameter=parameter)


@contextlib.contextmanager
def convert_errors(parameter: str) -> Iterator[None]:
    """Turn errors about a prompt or a grammar into InvalidRequest.

    Errors about the prompt name `parameter`, the field of the prompt; the others name their own field.
    """
    try:
        yield
    except InvalidSampling as error:
        if error.parameter != "width":
            raise
        problem = error.message.removeprefix("width: ")
        raise InvalidRequest(f"best_of: {problem}", error.remedy, parameter="best_of") from error
    except InvalidGrammar as error:
        raise InvalidRequest(f"{error.path}: {error.message}", parameter=error.path) from error
    except PromptTooLong as error:
        if error.context:
            raise ContextExceeded(error, parameter) from error
        raise InvalidRequest(error.message, error.remedy, parameter=parameter, code=CONTEXT_EXCEEDED) from error
    except AttachmentRefused as error:
        raise InvalidRequest(f"{error.path}: {error.message}", error.remedy, parameter=error.path) from error
    except ToolsUnsupported as error:
        raise InvalidRequest(f"tools: {error.message}", error.remedy, parameter="tools") from error
    except TemplateUnavailable:
        raise  # the field is not the cause: the process that renders templates failed
    except (TemplateError, InvalidMessage, TextTooLong) as error:
        raise InvalidRequest(error.message, error.remedy, parameter=parameter) from error


_ERROR_BODY: Final = "inglenook.error_body"  # key in an ASGI scope of the function that returns the body of an error


class ErrorFormats:
    """ASGI middleware around the access check and the endpoints.

    Errors have the format of the endpoint with the same path or a parent path, or else the default format.
    """

    def __init__(self, app: ASGIApp, endpoints: Iterable[Endpoint], default: ErrorFormat) -> None:
        shaped = [(one, one.errors.body) for one in endpoints if one.errors is not None]
        self._app = app
        self._default = default.body
        self._bodies = {one.path: body for one, body in shaped if not one.param_convertors}
        self._patterns = [(one.path_regex, body) for one, body in shaped if one.param_convertors]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[_ERROR_BODY] = self._body_for_path(scope.get("path", ""))
        await self._app(scope, receive, send)

    def _body_for_path(self, path: str) -> Callable[[Exception], Struct]:
        if body := next((body for pattern, body in self._patterns if pattern.match(path)), None):
            return body
        while path and path not in self._bodies:
            path = path.rpartition("/")[0]
        return self._bodies.get(path, self._default)


def error_response(error: Exception, scope: Scope) -> Response:
    """Return the complete response to a request that failed before anything was sent."""
    body = msgspec.json.encode(scope[_ERROR_BODY](error))
    headers = error.headers if isinstance(error, InvalidRequest) else None
    return Response(body, http_status(error), headers, media_type="application/json")


class ReplyBroken(Exception):
    """A reply failed after it had started; the connection must be closed."""


class UnhandledErrors:
    """ASGI middleware around the access check: logs exceptions that nothing else caught, and returns status 500."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def send_and_mark(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, send_and_mark)
        except ReplyBroken:
            raise
        except Exception as error:  # noqa: BLE001 # any error
            log.error("a request failed:\n%s", traceback_without_message(error))
            if started:
                raise ReplyBroken from None
            await error_response(error, scope)(scope, receive, send)


def traceback_without_message(error: BaseException) -> str:
    """Return the traceback of an exception without its message, which may contain text from the user."""
    frames = traceback.format_list(traceback.extract_tb(error.__traceback__))
    return "".join((*frames, type(error).__name__))
