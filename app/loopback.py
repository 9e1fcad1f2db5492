"""The listening sockets of the server: this machine's own addresses, and who to suspect when a port is taken.

Knows nothing of HTTP and of what is served.
"""

import errno
import socket
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

from app.errors import AppError

_BACKLOG = 128
_ATTEMPTS = 20  # to find a port that is free on both addresses
_NOT_THERE = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT})
_LISTENING = "0A"  # TCP state in /proc/net/tcp


class PortTaken(AppError):
    """Another program listens on the port."""


class LoopbackSockets:
    """Listening sockets on 127.0.0.1 and ::1, both on `port`, or on one that is free if it is 0.

    Both or neither, so that no one else can stand behind the other address; 127.0.0.1 alone where there is no IPv6.
    Making them raises PortTaken, or OSError when the system forbids the port.
    """

    def __init__(self, port: int) -> None:
        self.sockets = _listen_on_both(port) if port else _listen_anywhere()
        self.port: int = self.sockets[0].getsockname()[1]

    def close(self) -> None:
        """Close them; harmless where they are closed already."""
        for one in self.sockets:
            one.close()


def _listen_anywhere() -> list[socket.socket]:
    """The system chooses a port that is free on the first address, which may be taken on the second."""
    for _ in range(_ATTEMPTS - 1):
        with suppress(PortTaken):
            return _listen_on_both(0)
    return _listen_on_both(0)


def _listen_on_both(port: int) -> list[socket.socket]:
    with ExitStack() as opened:
        sockets = [opened.enter_context(_listen(socket.AF_INET, "127.0.0.1", port))]
        port = sockets[0].getsockname()[1]
        try:
            sockets.append(opened.enter_context(_listen(socket.AF_INET6, "::1", port)))
        except OSError as problem:
            if problem.errno not in _NOT_THERE:
                raise
        opened.pop_all()
    return sockets


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
        raise PortTaken(
            f"port {port} is taken by {_holder(port)}", "Stop it, or choose another port with --port."
        ) from None
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
