"""The first check of every request, on every path and with every method, by its head alone.

A page of another site can make the browser send requests here, under its own name (DNS rebinding) or under ours. Both
are refused; then whoever lacks a key that is needed; then whoever has too many requests under way. Nothing here knows
routes, dialects, or what a request asks for.
"""

from collections.abc import Collection

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from app.server.errors import InvalidRequest
from app.server.http.access import CALLER, Access
from app.server.http.error_responses import refusal
from app.server.http.page_origins import PageOrigins, header_values, is_preflight, preflight_headers, telling
from app.server.http.request_limits import RequestLimits

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")

MOST_HEADERS = 128
MAX_TARGET_BYTES = 8 << 10  # of path and query


class Door:
    """ASGI middleware.

    Host must be one of `names`, with our port or none, or the very address that the connection was made to.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        access: Access,
        limits: RequestLimits,
        names: Collection[str] = LOOPBACK_NAMES,
        origins: PageOrigins | None = None,
    ) -> None:
        self._app = app
        self._access = access
        self._limits = limits
        self._names = frozenset(name.lower().encode() for name in names)
        self._origins = origins or PageOrigins()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"a server of HTTP was asked for {scope['type']}")
        try:
            self._check_origin(scope)
        except InvalidRequest as error:
            await refusal(error, scope)(scope, receive, send)
            return
        if origin := self._origins.permitted(scope):
            if is_preflight(scope):
                await Response(status_code=204, headers=preflight_headers(scope, origin))(scope, receive, send)
                return
            send = telling(send, origin)
        try:
            _check_size(scope)
            caller = self._access.caller(scope)
            scope.setdefault("state", {})[CALLER] = caller
            with self._limits.counted(caller, scope["method"]):
                await self._app(scope, receive, send)
        except InvalidRequest as error:
            await refusal(error, scope)(scope, receive, send)

    def _check_origin(self, scope: Scope) -> None:
        hosts = header_values(scope, b"host")
        if len(hosts) != 1 or not self._is_ours(hosts[0], scope):
            problem = "The Host header does not name this server"
            remedy = "Call it by its address, or give it the name with INGLE_HOST_NAMES."
            raise InvalidRequest(problem, remedy, code="forbidden", status=403)
        if problem := self._origins.problem(scope, hosts[0]):
            raise InvalidRequest(problem, "Name theirs with INGLE_ALLOWED_ORIGINS.", code="forbidden", status=403)

    def _is_ours(self, host: bytes, scope: Scope) -> bool:
        server: tuple[str, int | None] | None = scope.get("server")
        address, port = server or ("", None)
        literal = f"[{address}]" if ":" in address else address  # no name that somebody else can give an address to
        name = host.removesuffix(f":{port}".encode())
        return host in self._names or name in self._names or name == literal.lower().encode()


def _check_size(scope: Scope) -> None:
    """Raises InvalidRequest for a head that no honest program sends."""
    if len(scope["headers"]) > MOST_HEADERS:
        raise InvalidRequest(f"There are more than {MOST_HEADERS} headers", "Send fewer.", status=431)
    if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > MAX_TARGET_BYTES:
        raise InvalidRequest(f"The path is longer than {MAX_TARGET_BYTES:,} bytes", "Send a shorter one.", status=414)
