"""The first check of every request: whether it comes from this machine's own programs, or from a web page.

A page of another site can make the browser send requests here, under its own name (DNS rebinding) or under ours. Both
are refused, on every path, by the raw headers alone. Nothing here knows routes, dialects or keys.
"""

from collections.abc import Collection, Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from app.server.errors import InvalidRequest
from app.server.openai_errors import error_response

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")

# What a browser says of a request that a page of ours, or the user, made. Other programs say nothing.
_OWN_FETCHES = frozenset((b"same-origin", b"none"))


class Door:
    """ASGI middleware. Lets a request in if Host is one of `names`, with our port or none, and no other site sent it.

    There are no CORS headers, so that pages of other sites cannot read replies either.
    """

    def __init__(self, app: ASGIApp, *, names: Collection[str]) -> None:
        self._app = app
        self._names = frozenset(name.lower().encode() for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (problem := self._problem(scope)):
            refusal = InvalidRequest(problem, code="forbidden", status=403)
            await error_response(refusal)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _problem(self, scope: Scope) -> str:
        """Why the request is refused, or empty."""
        hosts = _values(scope, b"host")
        if len(hosts) != 1 or not self._is_ours(hosts[0], scope):
            return "The Host header does not name this server"
        own_origins = (b"http://" + hosts[0], b"https://" + hosts[0])
        if any(origin not in own_origins for origin in _values(scope, b"origin")):
            return "Web pages of other origins may not use this server"
        if any(site not in _OWN_FETCHES for site in _values(scope, b"sec-fetch-site")):
            return "Web pages of other sites may not use this server"
        return ""

    def _is_ours(self, host: bytes, scope: Scope) -> bool:
        address: tuple[str, int | None] | None = scope.get("server")
        port = address[1] if address else None
        return host.removesuffix(f":{port}".encode()) in self._names


def _values(scope: Scope, name: bytes) -> list[bytes]:
    headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
    return [value.lower() for key, value in headers if key == name]
