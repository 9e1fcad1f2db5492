"""The first check of every request, on every path and with every method. It reads only the head of the request.

A page of another site can make the browser send requests to this server, under the site's name (DNS rebinding) or under
this server's name. Both are refused, then callers without a required key, then callers with too many requests in
progress. Browsers name the page that sent a request; other programs name none. Pages of the allowed origins may read
replies by CORS, each for its exact origin and without cookies.
"""

import re
from collections.abc import Collection

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.process.listening import bracketed
from app.server.http.access import CALLER, Authenticator, RequestLimits
from app.server.http.errors import InvalidRequest, error_response

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")

MAX_HEADERS = 128
MAX_TARGET_BYTES = 8 << 10  # limit of path and query together


# Values of Sec-Fetch-Site for requests that a page of this server or the user started.
_OWN_FETCH_SITES = frozenset((b"same-origin", b"none"))

_METHODS = "GET, POST, DELETE"
# allowed headers in the reply to a preflight request that names none
_HEADERS = "Authorization, Content-Type, X-API-Key, X-Ingle-Class"
_HEADER_LIST = re.compile(r"[\w!#$%&'*+.^`|~-]+(?:\s*,\s*[\w!#$%&'*+.^`|~-]+)*", re.ASCII)
_PREFLIGHT_MAX_AGE = "600"


def header_values(scope: Scope, name: bytes) -> list[bytes]:
    """Return the values of a header in lower case. `name` must be in lower case."""
    return [value.lower() for key, value in scope["headers"] if key == name]


class AllowedOrigins:
    """The origins whose pages may use one server."""

    def __init__(self, allowed: Collection[str] = ()) -> None:
        self._allowed = frozenset(origin.encode() for origin in allowed)

    def problem(self, scope: Scope, host: bytes) -> str:
        """Return why a web page's request is refused, or an empty string. `host` is the Host header."""
        if self.allowed_origin(scope) is not None:
            return ""
        own = (b"http://" + host, b"https://" + host)
        if any(origin not in own for origin in header_values(scope, b"origin")):
            return "Web pages of this origin may not use the server"
        if any(site not in _OWN_FETCH_SITES for site in header_values(scope, b"sec-fetch-site")):
            return "Web pages of this site may not use the server"
        return ""

    def allowed_origin(self, scope: Scope) -> str | None:
        """Return the origin of the request if it is one of the allowed origins."""
        origins = header_values(scope, b"origin")
        return origins[0].decode() if len(origins) == 1 and origins[0] in self._allowed else None


def is_preflight(scope: Scope) -> bool:
    """Whether a request is a CORS preflight, which has no key."""
    return scope["method"] == "OPTIONS" and bool(header_values(scope, b"access-control-request-method"))


def preflight_headers(scope: Scope, origin: str) -> dict[str, str]:
    """Return the headers of the reply to a preflight request from pages of `origin`.

    All requested headers are allowed: SDKs send many special ones, and the page may use the server anyway.
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
    """Return a `send` that adds the headers with which pages of `origin` may read the response."""

    async def send_with_origin(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["Access-Control-Allow-Origin"] = origin
            headers["Access-Control-Expose-Headers"] = "Retry-After"
            headers.add_vary_header("Origin")
        await send(message)

    return send_with_origin


class AccessMiddleware:
    """ASGI middleware that refuses requests without access.

    The Host header must be one of `names`, with this server's port or none, or the address of the connection.
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
            raise ValueError(f"unsupported scope type: {scope['type']}")
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
            remedy = "Use its address, or add the name to INGLE_HOST_NAMES."
            raise InvalidRequest(problem, remedy, code="forbidden", status=403)
        if problem := self._origins.problem(scope, hosts[0]):
            raise InvalidRequest(problem, "Add its origin to INGLE_ALLOWED_ORIGINS.", code="forbidden", status=403)

    def _names_this_server(self, host: bytes, scope: Scope) -> bool:
        server: tuple[str, int | None] | None = scope.get("server")
        address, port = server or ("", None)
        # the address itself, which no other site can use as its name
        literal = bracketed(address)
        name = host.removesuffix(f":{port}".encode())
        return host in self._names or name in self._names or name == literal.lower().encode()


def _check_head_size(scope: Scope) -> None:
    """Raise InvalidRequest for a head larger than any that real programs send."""
    if len(scope["headers"]) > MAX_HEADERS:
        raise InvalidRequest(f"The request has more than {MAX_HEADERS} headers", "Send fewer.", status=431)
    if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > MAX_TARGET_BYTES:
        raise InvalidRequest(f"The path is longer than {MAX_TARGET_BYTES:,} bytes", "Send a shorter one.", status=414)
