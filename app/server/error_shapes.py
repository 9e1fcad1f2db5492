"""How errors are written on each path, wherever they come up: at the door, on the way to an endpoint, or in it."""

from collections.abc import Callable, Iterable
from typing import Final

import msgspec
from msgspec import Struct
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

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
