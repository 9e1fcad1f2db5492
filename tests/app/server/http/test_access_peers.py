"""The owner of a connection is found from its two addresses, for IPv4 and IPv6. A closed socket has no owner."""

import errno
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from app.server.http import access
from app.server.http import socket_owner as lookup
from app.server.http.access import Peer
from app.server.http.socket_owner import socket_owner


@pytest.fixture(params=["_ask", "_search"], autouse=True)
def only_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Use only one of the two ways to find a socket."""
    (other,) = {"_ask", "_search"} - {request.param}
    monkeypatch.setattr(lookup, other, lambda local, remote: None)
    return str(request.param)


@pytest.fixture(params=["127.0.0.1", "::1"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket]]:
    """The client's socket and the server's socket of one connection."""
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    with (
        closing(socket.create_server((request.param, 0), family=family)) as listening,
        socket.create_connection(listening.getsockname()[:2]) as client,
        listening.accept()[0] as accepted,
    ):
        yield client, accepted


def the_peer(accepted: socket.socket) -> Peer:
    return Peer(accepted.getpeername()[:2], accepted.getsockname()[:2])


def test_program_of_this_user_is_recognized(ends: tuple[socket.socket, socket.socket]) -> None:
    client, accepted = ends
    assert socket_owner(client.getsockname()[:2], client.getpeername()[:2]) == os.geteuid()
    assert the_peer(accepted).is_this_user()


def test_owner_is_none_unless_both_ends_match(ends: tuple[socket.socket, socket.socket]) -> None:
    (host, port), (server, server_port) = (end.getsockname()[:2] for end in ends)
    for other in ((host, 1), ("127.0.0.2", port), ("10.0.0.1", port), ("::2", port)):
        assert socket_owner(other, (server, server_port)) is None
    for other in ((server, 1), ("127.0.0.2", server_port), ("10.0.0.1", server_port), ("::2", server_port)):
        assert socket_owner((host, port), other) is None
    assert socket_owner((server, server_port), (host, 1)) is None, "the socket that listens there has no other end"


def test_ipv4_client_on_an_ipv6_socket_is_recognized() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listening, socket.socket(socket.AF_INET6) as client:
        client.connect(("::ffff:127.0.0.1", listening.getsockname()[1]))
        with listening.accept()[0] as accepted:
            assert accepted.getpeername()[0] == "127.0.0.1"
            assert the_peer(accepted).is_this_user()


def test_closed_socket_has_no_owner(ends: tuple[socket.socket, socket.socket]) -> None:
    """A closed socket has no owner, although the kernel lists some closed sockets as root's."""
    client, accepted = ends
    addresses = client.getsockname()[:2], client.getpeername()[:2]
    client.close()
    assert socket_owner(*addresses) is None
    assert not the_peer(accepted).is_this_user()


@pytest.mark.parametrize("closing_end", ["client", "server"])
def test_half_closed_socket_has_an_owner_until_it_is_closed(
    ends: tuple[socket.socket, socket.socket], closing_end: str
) -> None:
    client, accepted = ends
    before, after = the_peer(accepted), the_peer(accepted)
    (client if closing_end == "client" else accepted).shutdown(socket.SHUT_WR)
    assert (before.is_open(), before.is_this_user()) == (True, True)
    client.close()
    assert (after.is_open(), after.is_this_user()) == (False, False)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_lookup_without_file_descriptors_raises(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch, only_way: str, number: int
) -> None:
    def fail(*arguments: object, **named: object) -> str:
        raise OSError(number, os.strerror(number))

    there = the_peer(ends[1])
    with monkeypatch.context() as patch:
        owner, name = {"_ask": (socket, "socket"), "_search": (Path, "read_text")}[only_way]
        patch.setattr(owner, name, fail)
        with pytest.raises(OSError, match="open files"):
            there.is_this_user()
    assert there.is_this_user()


def test_owner_is_looked_up_once(ends: tuple[socket.socket, socket.socket]) -> None:
    client, accepted = ends
    there = the_peer(accepted)
    assert there.is_this_user()
    client.close()
    assert there.is_this_user()


@pytest.mark.parametrize("uid", [os.geteuid() + 1, 65534])
def test_other_users_are_not_this_user(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch, uid: int
) -> None:
    monkeypatch.setattr(access, "socket_owner", lambda local, remote: uid)
    assert not the_peer(ends[1]).is_this_user()
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    assert not the_peer(ends[1]).is_this_user()


def test_systems_without_socket_owners_recognize_no_user(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "_ask", lambda local, remote: None)
    monkeypatch.setattr(lookup, "_TABLES", ((Path("/nowhere"), 4),))
    assert not the_peer(ends[1]).is_this_user()
    monkeypatch.undo()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not the_peer(ends[1]).is_this_user()
    monkeypatch.undo()
    assert not Peer(None, ("127.0.0.1", 1)).is_this_user()
