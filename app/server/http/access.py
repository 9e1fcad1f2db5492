"""Access to the server: API keys, the owner of the client's program, and the limit of requests per caller.

A key is sent as `Authorization: Bearer KEY` or as `x-api-key: KEY`. If no keys are configured, programs of the same
user need none, and all others are refused. Linux lists the owner of every TCP socket. The socket of a client has
exactly the two addresses and ports of the connection, and its program holds it even after it closed its half of the
connection. A socket without an owner counts as owned by another user.
"""

import hashlib
import hmac
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from starlette.types import Scope

from app.server.http.errors import InvalidRequest
from app.server.http.socket_owner import Address, socket_owner

# The kernel lists users without an id in this namespace under this number.
_NOBODY = 65534

RETRY_SECONDS = 1
LIMIT_RETRY_SECONDS = 5  # seconds until a caller with too many requests in progress may retry

CALLER = "caller"  # key of the Caller in the scope's state of each accepted request
PEER = "peer"  # key of the Peer in the scope's state of each request

# These paths need no key. Without one, health only reports whether the server works, and the page has no data.
HEALTH_PATHS = ("/health", "/v1/health")
PAGE_PATH = "/"
PAGE_FILES = "/inglenook/page/"  # the paths of the other files of the page start with this


@dataclass(slots=True)
class Peer:
    """The other end of one connection."""

    address: Address | None  # address of the client
    server: Address | None  # address of this server
    _is_this_user: bool | None = field(default=None, init=False)

    def is_this_user(self) -> bool:
        """Whether the client's program certainly belongs to the user of this process.

        The result is cached. Raises OSError if no file descriptor is left for the lookup.
        """
        if self._is_this_user is None:
            self._is_this_user = self._has_own_uid()
        return self._is_this_user

    def is_open(self) -> bool:
        """Whether a program certainly holds the connection. Not cached. Raises OSError like `is_this_user`."""
        return self._owner() is not None

    def _has_own_uid(self) -> bool:
        uid = self._owner()
        return uid is not None and uid == os.geteuid() and uid != _NOBODY

    def _owner(self) -> int | None:
        if sys.platform != "linux" or self.address is None or self.server is None:
            return None
        return socket_owner(self.address, self.server)


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request."""

    name: str  # identifies the API key without revealing it
    cache_salt: str = ""  # callers with different salts share no cached prefix and cannot detect each other's prompts
    is_authenticated: bool = True  # False: only public routes are allowed


ANONYMOUS = Caller("", is_authenticated=False)
THIS_USER = Caller("this user")
OTHER_MACHINE = Caller("another machine of this user")


class Authenticator:
    """Checks the API keys of one server."""

    def __init__(
        self,
        keys: Iterable[str] = (),
        own_key: str | None = None,
        shared_key: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Set the accepted keys.

        `keys` are the configured keys; without any, programs of this user need none. `own_key` is the key of the
        `ingle` commands, which is always accepted. `shared_key` returns the key of the user's other machines, which the
        user can revoke at any time; None: there is none.
        """
        self._shared_key = shared_key
        self._callers: dict[bytes, Caller] = {}
        for number, key in enumerate(keys):
            digest = _digest(key.encode())
            # The first key shares the cache that existed before there were keys.
            self._callers[digest] = Caller(f"key {number + 1}", f"key {digest.hex()}" if number else "")
        self._needs_key = bool(self._callers)
        if own_key is not None:
            self._callers.setdefault(_digest(own_key.encode()), THIS_USER)

    def authenticate(self, scope: Scope) -> Caller:
        """Return the caller. Raises InvalidRequest if the caller may not use the path."""
        for digest in map(_digest, _sent_keys(scope)):
            # Every key is compared, each in constant time, so that the duration reveals nothing about any key.
            found = [caller for expected, caller in self._callers.items() if hmac.compare_digest(expected, digest)]
            if found:
                return found[0]
            if (shared := self._shared_key()) is not None and hmac.compare_digest(_digest(shared.encode()), digest):
                return OTHER_MACHINE
        if not self._needs_key and _is_this_user(scope):
            return THIS_USER
        if is_public(scope["method"], scope["path"]):
            return ANONYMOUS
        raise InvalidRequest(
            "The API key is missing or unknown",
            "Send a key of this server as Authorization: Bearer KEY.",
            code="invalid_api_key",
            status=401,
            headers={"www-authenticate": "Bearer"},
        )


def is_public(method: str, path: str) -> bool:
    """Whether a request needs no key."""
    return method in ("GET", "HEAD") and (path in (*HEALTH_PATHS, PAGE_PATH) or path.startswith(PAGE_FILES))


def _sent_keys(scope: Scope) -> Iterator[bytes]:
    """Yield the keys of a request."""
    for name, value in scope["headers"]:
        if name == b"x-api-key":
            yield value.strip()
        elif name == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            if scheme.lower() == b"bearer":
                yield key.strip()


def _is_this_user(scope: Scope) -> bool:
    """Whether the client belongs to this user. Raises InvalidRequest if its owner cannot be looked up at the moment."""
    peer = scope.get("state", {}).get(PEER)
    try:
        return isinstance(peer, Peer) and peer.is_this_user()
    except OSError as error:
        raise InvalidRequest(
            "The server is out of file descriptors, and cannot identify the client",
            "Try again, or send an API key.",
            code="overloaded",
            status=503,
            headers={"retry-after": str(RETRY_SECONDS)},
        ) from error


def _digest(key: bytes) -> bytes:
    """Return a digest, which has the same length for all keys."""
    return hashlib.sha256(key).digest()


class RequestLimits:
    """Counts the requests in progress per caller."""

    def __init__(self, max_requests: int) -> None:
        """Set the limit of concurrent requests per caller, `max_requests`; 0: no limit."""
        self._max_requests = max_requests
        self._running: Counter[str] = Counter()

    @contextmanager
    def count_request(self, caller: Caller, method: str) -> Iterator[None]:
        """Count a request that computes something while the body runs.

        Raises InvalidRequest if the caller is at the limit.
        """
        if method != "POST":
            yield
            return
        if self._max_requests and self._running[caller.name] >= self._max_requests:
            raise InvalidRequest(
                f"This API key has {self._max_requests} requests in progress, which is the limit",
                f"Send it again in {LIMIT_RETRY_SECONDS} seconds, or raise max_requests.",
                code="rate_limit_exceeded",
                status=429,
                headers={"retry-after": str(LIMIT_RETRY_SECONDS)},
            )
        self._running[caller.name] += 1
        try:
            yield
        finally:
            self._running[caller.name] -= 1
            if not self._running[caller.name]:
                del self._running[caller.name]
