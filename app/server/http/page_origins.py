"""Which web pages may use the server: pages of its own, and those of origins that the user named. No others.

Browsers say of a request which page sent it; other programs say nothing. A page that is let in is told so by CORS, for
its exact origin and without cookies. Refuses to know keys and paths.
"""

import re
from collections.abc import Collection

from starlette.datastructures import MutableHeaders
from starlette.types import Message, Scope, Send

# What a browser says of a request that a page of ours, or the user, made.
_OWN_FETCHES = frozenset((b"same-origin", b"none"))

_METHODS = "GET, POST, DELETE"
_HEADERS = "Authorization, Content-Type, X-API-Key, X-Ingle-Class"  # for a preflight that names none
_HEADER_LIST = re.compile(r"[\w!#$%&'*+.^`|~-]+(?:\s*,\s*[\w!#$%&'*+.^`|~-]+)*", re.ASCII)
_REMEMBERED_SECONDS = "600"


def header_values(scope: Scope, name: bytes) -> list[bytes]:
    """In lower case; `name` is."""
    return [value.lower() for key, value in scope["headers"] if key == name]


class PageOrigins:
    """The origins that may use one server."""

    def __init__(self, named: Collection[str] = ()) -> None:
        self._named = frozenset(origin.encode() for origin in named)

    def problem(self, scope: Scope, host: bytes) -> str:
        """Why the page that sent the request is turned away, or empty. `host` is what it called the server."""
        if self.permitted(scope) is not None:
            return ""
        own = (b"http://" + host, b"https://" + host)
        if any(origin not in own for origin in header_values(scope, b"origin")):
            return "Web pages of other origins may not use this server"
        if any(site not in _OWN_FETCHES for site in header_values(scope, b"sec-fetch-site")):
            return "Web pages of other sites may not use this server"
        return ""

    def permitted(self, scope: Scope) -> str | None:
        """The named origin that a request of the right kind comes from."""
        origins = header_values(scope, b"origin")
        return origins[0].decode() if len(origins) == 1 and origins[0] in self._named else None


def is_preflight(scope: Scope) -> bool:
    """Whether a browser asks if a page may send a request. It carries no key."""
    return scope["method"] == "OPTIONS" and bool(header_values(scope, b"access-control-request-method"))


def preflight_headers(scope: Scope, origin: str) -> dict[str, str]:
    """Return the answer to a preflight for pages of `origin`.

    All headers that it asks for are allowed: SDKs send many of their own, and the page may use the server anyway.
    """
    asked = b", ".join(header_values(scope, b"access-control-request-headers")).decode("latin-1")
    headers = {
        "Access-Control-Allow-Origin": origin,
        "Access-Control-Allow-Methods": _METHODS,
        "Access-Control-Allow-Headers": asked if _HEADER_LIST.fullmatch(asked) else _HEADERS,
        "Access-Control-Max-Age": _REMEMBERED_SECONDS,
        "Vary": "Origin, Access-Control-Request-Headers",
    }
    if header_values(scope, b"access-control-request-private-network") == [b"true"]:
        headers["Access-Control-Allow-Private-Network"] = "true"
    return headers


def telling(send: Send, origin: str) -> Send:
    """`send`, which lets pages of `origin` read the response."""

    async def send_with_origin(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["Access-Control-Allow-Origin"] = origin
            headers["Access-Control-Expose-Headers"] = "Retry-After"
            headers.add_vary_header("Origin")
        await send(message)

    return send_with_origin
