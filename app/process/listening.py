"""Listening sockets of the server, and error messages that name the program that already listens on a port."""

import errno
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from app.errors import AppError

_BACKLOG = 128
_ATTEMPTS = 20  # attempts to find a port that is free on both addresses
_NO_ADDRESS = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT})
_LISTENING = "0A"  # TCP state in /proc/net/tcp
_CHOOSE_HOST = "Choose another address with --host."


class PortTaken(AppError):
    """Another program listens on the port."""


class NoSuchAddress(AppError):
    """The server cannot listen on this address, because this machine does not have it."""


# The second address of each pair is skipped on a machine without IPv6.
_LOOPBACK = ("127.0.0.1", "::1")
EVERYWHERE = {"0.0.0.0": ("0.0.0.0", "::1"), "::": ("0.0.0.0", "::")}  # noqa: S104
EVERY_ADDRESS = "::"


def is_loopback(host: str) -> bool:
    """Whether a server that listens on `host` is reachable from this machine only."""
    return host == "localhost" or host in _LOOPBACK


def bracketed(host: str) -> str:
    """Return a host as it precedes a port: an IPv6 address is in brackets."""
    return f"[{host}]" if ":" in host else host


def base_url(host: str, port: int) -> str:
    """Return the URL, without a path, by which this machine reaches a server that listens on `host`."""
    return f"http://{'127.0.0.1' if is_loopback(host) or host in EVERYWHERE else bracketed(host)}:{port}"


class ListeningSockets:
    """Listening sockets on all addresses of `host`, with the same port. Port 0 chooses a free one.

    For loopback and wildcard hosts, the sockets listen on both IPv4 and IPv6 or on neither, so that no other program
    can answer on the second address. Without IPv6, they listen on IPv4 only. The constructor raises PortTaken,
    NoSuchAddress, or OSError if the system forbids the port.
    """

    def __init__(
        self,
        port: int,
        host: str = "127.0.0.1",
        *,
        option: str = "--port",
        adopted: Sequence[socket.socket] = (),
    ) -> None:
        """Listen. `option`: the command-line option that errors name for another port.

        `adopted`: sockets that listen already, used instead of new ones. `port` is the main one if one of them has it.
        """
        self.sockets = list(adopted) or _listen_at(port, addresses_of(host), option)
        ports = [one.getsockname()[1] for one in self.sockets]
        self.port: int = port if port in ports else ports[0]

    @property
    def addresses(self) -> Sequence[str]:
        """The address of each socket."""
        return [str(one.getsockname()[0]) for one in self.sockets]

    def add(self, others: "ListeningSockets") -> None:
        """Take over the sockets of `others`. `port` does not change."""
        self.sockets += others.sockets

    def close(self) -> None:
        """Close all sockets. Closing them twice is harmless."""
        for one in self.sockets:
            one.close()


def addresses_of(host: str) -> Sequence[str]:
    """Return the addresses to listen on for a host. Raises NoSuchAddress."""
    return _LOOPBACK if is_loopback(host) else EVERYWHERE.get(host) or _resolved(host)


def _listen_at(port: int, addresses: Sequence[str], option: str) -> list[socket.socket]:
    try:
        return _listen_on_all(addresses, port) if port else _listen_anywhere(addresses)
    except PortTaken as problem:
        raise PortTaken(problem.message, f"Stop it, or choose another port with {option}.") from None


def _resolved(host: str) -> Sequence[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as problem:
        raise NoSuchAddress(f"{host} is not an address of this machine: {problem}", _CHOOSE_HOST) from None
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _listen_anywhere(addresses: Sequence[str]) -> list[socket.socket]:
    """Listen on a port that the system chooses on the first address. Retry if it is in use on the second."""
    for _ in range(_ATTEMPTS - 1):
        with suppress(PortTaken):
            return _listen_on_all(addresses, 0)
    return _listen_on_all(addresses, 0)


def _listen_on_all(addresses: Sequence[str], port: int) -> list[socket.socket]:
    with ExitStack() as opened:
        sockets: list[socket.socket] = []
        for address in addresses:
            try:
                sockets.append(opened.enter_context(_listen(_family(address), address, port)))
            except OSError as problem:
                if problem.errno not in _NO_ADDRESS:
                    raise
                if not sockets:
                    raise NoSuchAddress(f"{address} is not an address of this machine", _CHOOSE_HOST) from None
                continue
            port = sockets[0].getsockname()[1]
        opened.pop_all()
    return sockets


def _family(address: str) -> int:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _listen(family: int, address: str, port: int) -> socket.socket:
    # Without IPPROTO_TCP, asyncio leaves Nagle's algorithm on, which delays each reply by 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if sys.platform == "win32":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        else:  # a server that ended a moment ago leaves its port in TIME_WAIT
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((address, port))
        listener.listen(
            _BACKLOG
        )  # a socket that is bound must also listen, or another program could listen on the port
    except OSError as problem:
        listener.close()
        if problem.errno != errno.EADDRINUSE:
            raise
        raise PortTaken(f"port {port} is in use by {_holder(port)}") from None
    return listener


def _holder(port: int) -> str:
    """Describe the program that listens on `port`. On systems other than Linux it is "another program"."""
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        try:
            rows = [line.split() for line in table.read_text(encoding="ascii").splitlines()[1:]]
        except OSError:
            continue
        for row in rows:
            if row[3] == _LISTENING and int(row[1].rpartition(":")[2], 16) == port:
                return _program_of(inode=row[9]) or f"a program of {_user(int(row[7]))}"
    return "another program"


def _program_of(inode: str) -> str:
    """Return the name and pid of the process that has the socket open; empty if this user may not see it."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if str(link.readlink()) == f"socket:[{inode}]":
                pid = link.parts[2]
                return f"{Path('/proc', pid, 'comm').read_text(encoding='utf-8', errors='replace').strip()} (pid {pid})"
        except OSError:
            continue  # the process ended meanwhile, or belongs to another user
    return ""


def _user(uid: int) -> str:
    import pwd

    try:
        return f"the user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"the user {uid}"
