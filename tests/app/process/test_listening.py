"""Listening sockets are bound on both loopback addresses or on neither. Errors name the program that uses the port."""

import errno
import os
import socket
from contextlib import closing

import pytest

from app.process import listening
from app.process.listening import ListeningSockets, NoSuchAddress, PortTaken, is_loopback
from app.server.host import _listen
from app.settings.settings import load_settings


def listener(family: int, address: str) -> socket.socket:
    taken = socket.socket(family, socket.SOCK_STREAM)
    taken.bind((address, 0))
    taken.listen()
    return taken


def test_loopback_addresses_share_one_free_port() -> None:
    with closing(ListeningSockets(0)) as sockets:
        assert sockets.port > 0
        for address in ("127.0.0.1", "::1"):
            socket.create_connection((address, sockets.port)).close()


@pytest.mark.parametrize(
    ("family", "address", "other"), [(socket.AF_INET, "127.0.0.1", "::1"), (socket.AF_INET6, "::1", "127.0.0.1")]
)
def test_port_in_use_on_one_address_is_not_bound_on_the_other(family: int, address: str, other: str) -> None:
    with listener(family, address) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortTaken, match=f"port {port} is in use by .* \\(pid {os.getpid()}\\)"):
            ListeningSockets(port)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((other, port))


def test_ollama_port_belongs_to_the_same_server() -> None:
    with closing(ListeningSockets(0)) as free:
        port = free.port
    settings = load_settings(port=0, ollama_port=port)
    with closing(_listen(settings)) as sockets:
        assert sockets.port != port
        for one in (sockets.port, port):
            for address in ("127.0.0.1", "::1"):
                socket.create_connection((address, one)).close()
        with pytest.raises(PortTaken, match=f"port {port} is in use by") as refused:
            _listen(settings)
        assert refused.value.remedy == "Stop it, or choose another port with --ollama-port."
    assert load_settings().ollama_port == 0  # Ollama's port is off by default


def test_error_names_the_program_that_uses_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "_program_of", lambda inode: "")
    with listener(socket.AF_INET, "127.0.0.1") as taken, pytest.raises(PortTaken, match="a program of the user "):
        ListeningSockets(taken.getsockname()[1])


def test_free_port_is_free_on_both_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the IPv6 address, the first two ports that the system chose are in use."""
    chosen: list[int] = []
    listen = listening._listen

    def unlucky(family: int, address: str, port: int) -> socket.socket:
        if family == socket.AF_INET6:
            chosen.append(port)
            if len(chosen) < 3:
                raise PortTaken("taken")
        return listen(family, address, port)

    monkeypatch.setattr(listening, "_listen", unlucky)
    with closing(ListeningSockets(0)) as sockets:
        assert sockets.port == chosen[2]
    for port in chosen[:2]:
        ListeningSockets(port).close()


def test_without_ipv6_only_ipv4_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    listen = listening._listen

    def without_ipv6(family: int, address: str, port: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
        return listen(family, address, port)

    monkeypatch.setattr(listening, "_listen", without_ipv6)
    with closing(ListeningSockets(0)) as sockets:
        assert len(sockets.sockets) == 1
        socket.create_connection(("127.0.0.1", sockets.port)).close()


def test_port_is_reusable_at_once() -> None:
    """The port is in TIME_WAIT, because the server has closed a connection."""
    with closing(ListeningSockets(0)) as sockets:
        client = socket.create_connection(("127.0.0.1", sockets.port))
        sockets.sockets[0].accept()[0].close()
        client.close()
    ListeningSockets(sockets.port).close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])  # noqa: S104
def test_wildcard_host_includes_both_loopback_addresses(host: str) -> None:
    with closing(ListeningSockets(0, host)) as sockets:
        for address in ("127.0.0.1", "::1"):
            socket.create_connection((address, sockets.port)).close()


def test_single_address_binds_only_that_address() -> None:
    with closing(ListeningSockets(0, "127.0.0.2")) as sockets:
        socket.create_connection(("127.0.0.2", sockets.port)).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", sockets.port))


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "no such name"])
def test_error_names_a_foreign_address(host: str) -> None:
    with pytest.raises(NoSuchAddress, match=host):
        ListeningSockets(0, host)


def test_only_loopback_addresses_are_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.1.2", "mybox", "127.0.0.1.evil.com", "")))  # noqa: S104
