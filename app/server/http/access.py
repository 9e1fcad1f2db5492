"""Who may use the server: the one check of keys, for every path and every method.

A key travels as `Authorization: Bearer KEY` or as `x-api-key: KEY`. Where no key was chosen, programs of this user need
none, and only those. Refuses to know where keys come from, and what the paths do.
"""

import hashlib
import hmac
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from starlette.types import Scope

from app.server.errors import InvalidRequest
from app.server.http.peer import Peer

RETRY_SECONDS = 1

CALLER = "caller"  # where the Caller is, in the state of the scope of each request that is let in
PEER = "peer"  # where a connection puts its Peer, in the state of each request's scope

# What is answered to anybody, and says nothing but whether the server works.
HEALTH_PATHS = ("/health", "/v1/health")
PUBLIC = frozenset((method, path) for method in ("GET", "HEAD") for path in HEALTH_PATHS)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a request comes from."""

    name: str  # the same for all requests with one key; it does not tell the key
    cache_salt: str = ""  # callers of different salts share no cached prefix, and hear nothing of each other's prompts
    is_known: bool = True  # False: anybody, who may ask for what is public


ANYBODY = Caller("", is_known=False)
THIS_USER = Caller("this user")


class Access:
    """The keys of one server."""

    def __init__(self, chosen: Iterable[str] = (), own: str | None = None) -> None:
        """`chosen` are the keys that programs need; none: those of this user need no key. `own` is the key of our own
        commands, good beside the others."""
        self._callers: dict[bytes, Caller] = {}
        for number, key in enumerate(chosen):
            digest = _digest(key.encode())
            # The first key is the owner's, who was alone before there were others: its cache stays.
            self._callers[digest] = Caller(f"key {number + 1}", f"key {digest.hex()}" if number else "")
        self._needs_key = bool(self._callers)
        if own is not None:
            self._callers.setdefault(_digest(own.encode()), THIS_USER)

    def caller(self, scope: Scope) -> Caller:
        """Who sent the request. Raises InvalidRequest for whoever may not ask for that path."""
        for digest in map(_digest, _presented(scope)):
            # All of them are compared, each in constant time: how long that takes tells nothing of any key.
            found = [caller for known, caller in self._callers.items() if hmac.compare_digest(known, digest)]
            if found:
                return found[0]
        if not self._needs_key and _is_this_user(scope):
            return THIS_USER
        if (scope["method"], scope["path"]) in PUBLIC:
            return ANYBODY
        raise InvalidRequest(
            "This server does not know the API key of the request, or there is none",
            "Send one of its keys as Authorization: Bearer KEY.",
            code="invalid_api_key",
            status=401,
            headers={"www-authenticate": "Bearer"},
        )


def _presented(scope: Scope) -> Iterator[bytes]:
    """The keys of a request."""
    for name, value in scope["headers"]:
        if name == b"x-api-key":
            yield value.strip()
        elif name == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            if scheme.lower() == b"bearer":
                yield key.strip()


def _is_this_user(scope: Scope) -> bool:
    """Raises InvalidRequest if that cannot be told at the moment."""
    peer = scope.get("state", {}).get(PEER)
    try:
        return isinstance(peer, Peer) and peer.is_this_user()
    except OSError as error:
        raise InvalidRequest(
            "The server has no file descriptor left to find out whose request this is",
            "Try again, or send an API key.",
            code="overloaded",
            status=503,
            headers={"retry-after": str(RETRY_SECONDS)},
        ) from error


def _digest(key: bytes) -> bytes:
    """Of one length, whatever the key's."""
    return hashlib.sha256(key).digest()
