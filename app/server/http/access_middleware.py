"""The first check of every request, on every path and with every method, by its head alone.

A page of another site can make the browser send requests here, under its own name (DNS rebinding) or under ours. Both
are refused, then callers without a key that they need, then callers with too many requests under way. Browsers name the
page that sent a request; other programs name none. Pages of the origins that the user named may read replies by CORS,
each for its exact origin and without cookies.
"""

import re
from collections.abc import Collection

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.server.http.access import CALLER, Authenticator, RequestLimits
from app.server.http.errors import InvalidRequest, error_response

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")

MAX_HEADERS = 128
MAX_TARGET_BYTES = 8 << 10  # of path and query


# What a browser says of a request that a page of ours, or the user, made.
_OWN_FETCH_SITES = frozenset((b"same-origin", b"none"))

_METHODS = "GET, POST, DELETE"
_HEADERS = "Authorization, Content-Type, X-API-Key, X-Ingle-Class"  # for a preflight that names none
_HEADER_LIST = re.compile(r"[\w!#$%&'*+.^`|~-]+(?:\s*,\s*[\w!#$%&'*+.^`|~-]+)*", re.ASCII)
_PREFLIGHT_MAX_AGE = "600"


def header_values(scope: Scope, name: bytes) -> list[bytes]:
    """In lower case; `name` is."""
    return [value.lower() for key, value in scope["headers"] if key == name]


class AllowedOrigins:
    """The origins that may use one server."""

    def __init__(self, allowed: Collection[str] = ()) -> None:
        self._allowed = frozenset(origin.encode() for origin in allowed)

    def problem(self, scope: Scope, host: bytes) -> str:
        """Why the page that sent the request is turned away, or empty. `host` is what it called the server."""
        if self.allowed_origin(scope) is not None:
            return ""
        own = (b"http://" + host, b"https://" + host)
        if any(origin not in own for origin in header_values(scope, b"origin")):
            return "Web pages of other origins may not use this server"
        if any(site not in _OWN_FETCH_SITES for site in header_values(scope, b"sec-fetch-site")):
            return "Web pages of other sites may not use this server"
        return ""

    def allowed_origin(self, scope: Scope) -> str | None:
        """The named origin that a request of the right kind comes from."""
        origins = header_values(scope, b"origin")
        return origins[0].decode() if len(origins) == 1 and origins[0] in self._allowed else None


def is_preflight(scope: Scope) -> bool:
    """Whether a browser asks if a page may send a request. It carries no key."""
    return scope["method"] == "OPTIONS" and bool(header_values(scope, b"access-control-request-method"))


def preflight_headers(scope: Scope, origin: str) -> dict[str, str]:
    """Return the answer to a preflight for pages of `origin`.

    All headers that it asks for are allowed: SDKs send many of their own, and the page may use the server anyway.
    """
    requested = b", ".join(header_values(scope, b"access-control-request-headers")).decode("latin-1")
    headers = {
        "Access-Control-Allow-Origin": origin,
        "Access-Control-Allow-Methods": _METHODS,
        "Access-Control-Allow-Headers": requested if _HEADER_LIST.fullmatch(requested) else _HEADERS,
        "Access-Control-Max-Age": _PREFLIGHT_MAX_AGE,
        "Vary": "Origin, Access-Control-Request-Headers",
    }
    if header_values(scope, b"access-control-request-private-network") == [b"true"]:
        headers["Access-Control-Allow-Private-Network"] = "true"
    return headers


def with_cors_headers(send: Send, origin: str) -> Send:
    """`send`, which lets pages of `origin` read the response."""

    async def send_with_origin(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["Access-Control-Allow-Origin"] = origin
            headers["Access-Control-Expose-Headers"] = "Retry-After"
            headers.add_vary_header("Origin")
        await send(message)

    return send_with_origin


class AccessMiddleware:
    """ASGI middleware.

    Host must be one of `names`, with our port or none, or the very address that the connection was made to.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        authenticator: Authenticator,
        limits: RequestLimits,
        names: Collection[str] = LOOPBACK_NAMES,
        origins: AllowedOrigins | None = None,
    ) -> None:
        self._app = app
        self._authenticator = authenticator
        self._limits = limits
        self._names = frozenset(name.lower().encode() for name in names)
        self._origins = origins or AllowedOrigins()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"a server of HTTP was asked for {scope['type']}")
        try:
            self._check_origin(scope)
        except InvalidRequest as error:
            await error_response(error, scope)(scope, receive, send)
            return
        if origin := self._origins.allowed_origin(scope):
            if is_preflight(scope):
                await Response(status_code=204, headers=preflight_headers(scope, origin))(scope, receive, send)
                return
            send = with_cors_headers(send, origin)
        try:
            _check_head_size(scope)
            caller = self._authenticator.authenticate(scope)
            scope.setdefault("state", {})[CALLER] = caller
            with self._limits.count_request(caller, scope["method"]):
                await self._app(scope, receive, send)
        except InvalidRequest as error:
            await error_response(error, scope)(scope, receive, send)

    def _check_origin(self, scope: Scope) -> None:
        hosts = header_values(scope, b"host")
        if len(hosts) != 1 or not self._names_this_server(hosts[0], scope):
            problem = "The Host header does not name this server"
            remedy = "Call it by its address, or give it the name with INGLE_HOST_NAMES."
            raise InvalidRequest(problem, remedy, code="forbidden", status=403)
        if problem := self._origins.problem(scope, hosts[0]):
            raise InvalidRequest(problem, "Name theirs with INGLE_ALLOWED_ORIGINS.", code="forbidden", status=403)

    def _names_this_server(self, host: bytes, scope: Scope) -> bool:
        server: tuple[str, int | None] | None = scope.get("server")
        address, port = server or ("", None)
        literal = f"[{address}]" if ":" in address else address  # no name that somebody else can give an address to
        name = host.removesuffix(f":{port}".encode())
        return host in self._names or name in self._names or name == literal.lower().encode()


def _check_head_size(scope: Scope) -> None:
    """Raises InvalidRequest for a head that no honest program sends."""
    if len(scope["headers"]) > MAX_HEADERS:
        raise InvalidRequest(f"There are more than {MAX_HEADERS} headers", "Send fewer.", status=431)
    if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > MAX_TARGET_BYTES:
        raise InvalidRequest(f"The path is longer than {MAX_TARGET_BYTES:,} bytes", "Send a shorter one.", status=414)
