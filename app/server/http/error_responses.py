"""Error responses in the dialect of a path, and of exceptions that no endpoint caught."""

import logging
import traceback
from collections.abc import Callable, Iterable
from typing import Final

import msgspec
from msgspec import Struct
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.server.dialects.openai.errors import error_body
from app.server.endpoint import Endpoint
from app.server.errors import InvalidRequest, status_of

_BODY: Final = "inglenook.error_body"  # of a scope: what writes the body of an error


class ErrorShapes:
    """ASGI middleware around the door and the endpoints.

    Errors have the shape of the endpoint whose path they are at or below, and OpenAI's elsewhere."""

    def __init__(self, app: ASGIApp, endpoints: Iterable[Endpoint]) -> None:
        shaped = [(one, one.errors.body) for one in endpoints if one.errors is not None]
        self._app = app
        self._bodies = {one.path: body for one, body in shaped if not one.param_convertors}
        self._patterns = [(one.path_regex, body) for one, body in shaped if one.param_convertors]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[_BODY] = self._body_at(scope.get("path", ""))
        await self._app(scope, receive, send)

    def _body_at(self, path: str) -> Callable[[Exception], Struct]:
        if body := next((body for pattern, body in self._patterns if pattern.match(path)), None):
            return body
        while path and path not in self._bodies:
            path = path.rpartition("/")[0]
        return self._bodies.get(path, error_body)


def refusal(error: Exception, scope: Scope) -> Response:
    """The whole response to a request that ended with `error` before anything was sent."""
    body = msgspec.json.encode(scope.get(_BODY, error_body)(error))
    headers = error.headers if isinstance(error, InvalidRequest) else None
    return Response(body, status_of(error), headers, media_type="application/json")


log = logging.getLogger(__name__)


class ReplyBroken(Exception):
    """A reply that had begun cannot go on; the connection is to be closed."""


class Mistakes:
    """ASGI middleware around the door: what is raised inside ends here, in a line of the log and a 500."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def send_and_note(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except Exception as error:  # noqa: BLE001  # whatever it is
            log.error("a request failed:\n%s", place_of(error))
            if begun:
                raise ReplyBroken from None
            await refusal(error, scope)(scope, receive, send)


def place_of(error: BaseException) -> str:
    """The traceback of an exception without its words."""
    frames = traceback.format_list(traceback.extract_tb(error.__traceback__))
    return "".join((*frames, type(error).__name__))
