"""Access to the server: the keys, the user at the other end of a connection, and the limit of requests of one caller.

A key travels as `Authorization: Bearer KEY` or as `x-api-key: KEY`. Without a chosen key, programs of this user need
none, and all others are refused. Linux lists the owner of every TCP socket. The socket of a client has exactly the two
addresses and ports of the connection, and its program still holds it, even if that has closed its half of the
connection. Sockets that no program holds are listed without an inode, and as root's. A socket that is not listed is not
this user's.
"""

import errno
import hashlib
import hmac
import ipaddress
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from starlette.types import Scope

from app.server.http.errors import InvalidRequest

Address = tuple[str, int]

_TABLES = ((Path("/proc/net/tcp"), 4), (Path("/proc/net/tcp6"), 6))
_UID, _INODE = 7, 9  # columns
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
# The kernel lists users under this number that have none in this namespace.
_NOBODY = 65534

RETRY_SECONDS = 1
LIMIT_RETRY_SECONDS = 5  # for a caller that has too many requests under way

CALLER = "caller"  # where the Caller is, in the state of the scope of each request that is let in
PEER = "peer"  # where a connection puts its Peer, in the state of each request's scope

# Paths that need no key; without one, they only report whether the server works.
HEALTH_PATHS = ("/health", "/v1/health")
PUBLIC_ROUTES = frozenset((method, path) for method in ("GET", "HEAD") for path in HEALTH_PATHS)


@dataclass(slots=True)
class Peer:
    """The other end of one connection."""

    address: Address | None  # its own
    server: Address | None  # ours
    _is_this_user: bool | None = field(default=None, init=False)

    def is_this_user(self) -> bool:
        """Whether the program there is certainly of the user that this process runs as. Looked up once. Raises OSError
        if there is no file descriptor left to find out."""
        if self._is_this_user is None:
            self._is_this_user = self._has_own_uid()
        return self._is_this_user

    def is_open(self) -> bool:
        """Whether a program there certainly holds the connection. Looked up each time; raises as `is_this_user`."""
        return self._owner() is not None

    def _has_own_uid(self) -> bool:
        uid = self._owner()
        return uid is not None and uid == os.geteuid() and uid != _NOBODY

    def _owner(self) -> int | None:
        if sys.platform != "linux" or self.address is None or self.server is None:
            return None
        return socket_owner(self.address, self.server)


def socket_owner(local: Address, remote: Address) -> int | None:
    """The user id of this machine's socket from `local` to `remote` that a program holds; None if there is none. Raises
    OSError if there is no file descriptor left to find out."""
    for table, version in _TABLES:
        ends = [_table_address(address, version) for address in (local, remote)]
        if all(ends) and (row := _find_row(table, f": {ends[0]} {ends[1]} ").split()) and row[_INODE] != "0":
            return int(row[_UID])
    return None


def _find_row(table: Path, addresses: str) -> str:
    try:
        rows = table.read_text(encoding="ascii")
    except OSError as error:
        if error.errno in _OUT_OF_DESCRIPTORS:
            raise
        return ""
    index = rows.find(addresses)
    return "" if index < 0 else rows[rows.rfind("\n", 0, index) + 1 :].partition("\n")[0]


def _table_address(address: Address, version: int) -> str:
    """An address as the kernel lists it: words in this machine's byte order. Empty in the table of another family.

    A program may have reached an IPv4 address through a socket of IPv6, which lists it as one that is mapped.
    """
    host = ipaddress.ip_address(address[0].partition("%")[0])
    if version == 4:
        packed = host.packed if host.version == 4 else b""
    else:
        packed = host.packed if host.version == 6 else b"\0" * 10 + b"\xff\xff" + host.packed
    words = (packed[start : start + 4] for start in range(0, len(packed), 4))
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words) + f":{address[1]:04X}" * bool(packed)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a request comes from."""

    name: str  # the same for all requests with one key; it does not tell the key
    cache_salt: str = ""  # callers of different salts share no cached prefix, and hear nothing of each other's prompts
    is_authenticated: bool = True  # False: anybody, who may ask for what is public


ANONYMOUS = Caller("", is_authenticated=False)
THIS_USER = Caller("this user")


class Authenticator:
    """The keys of one server."""

    def __init__(self, keys: Iterable[str] = (), own_key: str | None = None) -> None:
        """`keys` are the keys that programs need; none: those of this user need no key. `own_key` is the key of our own
        commands, good beside the others."""
        self._callers: dict[bytes, Caller] = {}
        for number, key in enumerate(keys):
            digest = _digest(key.encode())
            # The first key is the owner's, who was alone before there were others: its cache stays.
            self._callers[digest] = Caller(f"key {number + 1}", f"key {digest.hex()}" if number else "")
        self._needs_key = bool(self._callers)
        if own_key is not None:
            self._callers.setdefault(_digest(own_key.encode()), THIS_USER)

    def authenticate(self, scope: Scope) -> Caller:
        """Who sent the request. Raises InvalidRequest for whoever may not ask for that path."""
        for digest in map(_digest, _sent_keys(scope)):
            # All of them are compared, each in constant time: how long that takes tells nothing of any key.
            found = [caller for expected, caller in self._callers.items() if hmac.compare_digest(expected, digest)]
            if found:
                return found[0]
        if not self._needs_key and _is_this_user(scope):
            return THIS_USER
        if (scope["method"], scope["path"]) in PUBLIC_ROUTES:
            return ANONYMOUS
        raise InvalidRequest(
            "This server does not know the API key of the request, or there is none",
            "Send one of its keys as Authorization: Bearer KEY.",
            code="invalid_api_key",
            status=401,
            headers={"www-authenticate": "Bearer"},
        )


def _sent_keys(scope: Scope) -> Iterator[bytes]:
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


class RequestLimits:
    """Counts the requests under way, by caller."""

    def __init__(self, max_requests: int) -> None:
        """`max_requests` of one caller at a time; 0: any number."""
        self._max_requests = max_requests
        self._running: Counter[str] = Counter()

    @contextmanager
    def count_request(self, caller: Caller, method: str) -> Iterator[None]:
        """Count a request while the body runs, if it is one that work is done for. Raises InvalidRequest where there
        are enough already."""
        if method != "POST":
            yield
            return
        if self._max_requests and self._running[caller.name] >= self._max_requests:
            raise InvalidRequest(
                f"{self._max_requests} requests of this API key are under way, and no more are taken",
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
