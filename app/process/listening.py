"""The listening sockets of the server: on which addresses, and who to suspect when a port is taken.

Knows nothing of HTTP and of what is served.
"""

import errno
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from app.errors import AppError

_BACKLOG = 128
_ATTEMPTS = 20  # to find a port that is free on both addresses
_NOT_THERE = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT})
_LISTENING = "0A"  # TCP state in /proc/net/tcp
_CHOOSE_HOST = "Choose another one with --host."


class PortTaken(AppError):
    """Another program listens on the port."""


class NoSuchAddress(AppError):
    """This machine does not have the address that the server is to listen on."""


# Of each pair the second one may be missing, on a machine without IPv6.
_LOOPBACK = ("127.0.0.1", "::1")
EVERYWHERE = {"0.0.0.0": ("0.0.0.0", "::1"), "::": ("0.0.0.0", "::")}  # noqa: S104


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens there."""
    return host == "localhost" or host in _LOOPBACK


class ListeningSockets:
    """Listening sockets on `host`, all on `port`, or on one that is free if it is 0.

    Where that is this machine alone, or all of its addresses, they stand on 127.0.0.1 and on ::1, or on neither, so
    that no one else can stand behind the other address; on 127.0.0.1 alone where there is no IPv6. Making them raises
    PortTaken, NoSuchAddress, or OSError when the system forbids the port.
    """

    def __init__(self, port: int, host: str = "127.0.0.1", *, option: str = "--port") -> None:
        """`option` is where the user chooses another port."""
        addresses = _LOOPBACK if is_loopback(host) else EVERYWHERE.get(host) or _resolved(host)
        try:
            self.sockets = _listen_on_all(addresses, port) if port else _listen_anywhere(addresses)
        except PortTaken as problem:
            remedy = f"Stop it, or choose another port with {option}."
            raise PortTaken(problem.message, remedy) from None
        self.port: int = self.sockets[0].getsockname()[1]

    def add(self, others: "ListeningSockets") -> None:
        """Have those stand for this one's, too; `port` stays what it is."""
        self.sockets += others.sockets

    def close(self) -> None:
        """Close them; harmless where they are closed already."""
        for one in self.sockets:
            one.close()


def _resolved(host: str) -> Sequence[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as problem:
        raise NoSuchAddress(f"{host} is no address of this machine: {problem}", _CHOOSE_HOST) from None
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _listen_anywhere(addresses: Sequence[str]) -> list[socket.socket]:
    """The system chooses a port that is free on the first address, which may be taken on the second."""
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
                if problem.errno not in _NOT_THERE:
                    raise
                if not sockets:
                    raise NoSuchAddress(f"{address} is no address of this machine", _CHOOSE_HOST) from None
                continue
            port = sockets[0].getsockname()[1]
        opened.pop_all()
    return sockets


def _family(address: str) -> int:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _listen(family: int, address: str, port: int) -> socket.socket:
    # Named as TCP, or asyncio leaves Nagle's algorithm on, and every reply waits 40 ms for the client's kernel.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if sys.platform == "win32":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        else:  # a server that ended a moment ago leaves the port in TIME_WAIT
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((address, port))
        listener.listen(_BACKLOG)  # at once: only a listening socket keeps others from the port
    except OSError as problem:
        listener.close()
        if problem.errno != errno.EADDRINUSE:
            raise
        raise PortTaken(f"port {port} is taken by {_holder(port)}") from None
    return listener


def _holder(port: int) -> str:
    """Who listens on `port`, in words. Linux tells; elsewhere it is another program."""
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
    """The process that has the socket open; empty when it is not ours to look at."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if str(link.readlink()) == f"socket:[{inode}]":
                pid = link.parts[2]
                return f"{Path('/proc', pid, 'comm').read_text(encoding='utf-8', errors='replace').strip()} (pid {pid})"
        except OSError:
            continue  # it ended meanwhile, or it is someone else's
    return ""


def _user(uid: int) -> str:
    import pwd

    try:
        return f"the user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"the user {uid}"
