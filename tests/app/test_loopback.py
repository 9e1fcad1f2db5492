"""The listening sockets: both addresses or neither, and who is named when a port is taken."""

import errno
import os
import socket
from contextlib import closing

import pytest

from app import loopback
from app.loopback import LoopbackSockets, PortTaken


def listener(family: int, address: str) -> socket.socket:
    taken = socket.socket(family, socket.SOCK_STREAM)
    taken.bind((address, 0))
    taken.listen()
    return taken


def test_both_addresses_are_bound_to_one_free_port() -> None:
    with closing(LoopbackSockets(0)) as sockets:
        assert sockets.port > 0
        for address in ("127.0.0.1", "::1"):
            socket.create_connection((address, sockets.port)).close()


@pytest.mark.parametrize(
    ("family", "address", "other"), [(socket.AF_INET, "127.0.0.1", "::1"), (socket.AF_INET6, "::1", "127.0.0.1")]
)
def test_a_port_that_is_taken_on_one_address_is_left_alone_on_the_other(family: int, address: str, other: str) -> None:
    with listener(family, address) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortTaken, match=f"port {port} is taken by .* \\(pid {os.getpid()}\\)"):
            LoopbackSockets(port)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((other, port))


def test_a_port_of_another_user_is_named_by_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopback, "_program_of", lambda inode: "")
    with listener(socket.AF_INET, "127.0.0.1") as taken, pytest.raises(PortTaken, match="a program of the user "):
        LoopbackSockets(taken.getsockname()[1])


def test_any_port_is_one_that_is_free_on_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """The port that the system chose first happens to be taken on the second address."""
    chosen: list[int] = []
    listen = loopback._listen

    def unlucky(family: int, address: str, port: int) -> socket.socket:
        if family == socket.AF_INET6:
            chosen.append(port)
            if len(chosen) < 3:
                raise PortTaken("taken")
        return listen(family, address, port)

    monkeypatch.setattr(loopback, "_listen", unlucky)
    with closing(LoopbackSockets(0)) as sockets:
        assert sockets.port == chosen[2]
    for port in chosen[:2]:
        LoopbackSockets(port).close()


def test_a_machine_without_ipv6_gets_the_one_address(monkeypatch: pytest.MonkeyPatch) -> None:
    listen = loopback._listen

    def without_ipv6(family: int, address: str, port: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
        return listen(family, address, port)

    monkeypatch.setattr(loopback, "_listen", without_ipv6)
    with closing(LoopbackSockets(0)) as sockets:
        assert len(sockets.sockets) == 1
        socket.create_connection(("127.0.0.1", sockets.port)).close()


def test_a_port_can_be_used_again_at_once() -> None:
    """Even where a connection was closed from this side, which leaves the port in TIME_WAIT."""
    with closing(LoopbackSockets(0)) as sockets:
        client = socket.create_connection(("127.0.0.1", sockets.port))
        sockets.sockets[0].accept()[0].close()
        client.close()
    LoopbackSockets(sockets.port).close()
