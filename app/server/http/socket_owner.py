"""The owner of a TCP socket of this machine, which Linux tells to every program.

The kernel is asked about one socket (sock_diag(7)), which takes 0.02 ms. Without an answer, its tables of all sockets
are searched, which takes 10 ms. A socket that no program holds has no inode, and is listed as owned by root.
"""

import errno
import ipaddress
import socket
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

Address = tuple[str, int]

_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)

# The parts of a request of sock_diag(7) and of its answer.
_SOCK_DIAG, _BY_FAMILY, _REQUEST = 4, 20, 1
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_QUESTION = struct.Struct("=BBBBI")  # family, protocol, extensions, padding, states
_SOCKET = struct.Struct("!HH16s16s")  # ports and addresses of the socket's own end and of the other end
_ANY_INTERFACE = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)  # and no cookie
_STATE = struct.Struct("=BBBB")  # family, state, timer, retransmissions
_OWNER = struct.Struct("=IIIII")  # expiry, both queues, user id, inode
_EVERY_STATE, _LISTENING = 0xFFFFFFFF, 10

_TABLES = ((Path("/proc/net/tcp"), 4), (Path("/proc/net/tcp6"), 6))
_UID, _INODE = 7, 9  # columns of the tables


@dataclass(frozen=True, slots=True)
class _Row:
    """A socket as the kernel lists it."""

    uid: int
    inode: int  # 0: no program holds it


def socket_owner(local: Address, remote: Address) -> int | None:
    """Return the user id of the program that holds this machine's socket from `local` to `remote`, or None.

    Raises OSError if no file descriptor is left for the lookup.
    """
    row = _ask(local, remote) or _search(local, remote)
    return row.uid if row is not None and row.inode else None


def _ask(local: Address, remote: Address) -> _Row | None:
    """Ask the kernel about one socket. Returns None if it finds none, or does not answer."""
    ends = [_packed(address) for address in (local, remote)]
    if len(ends[0]) != len(ends[1]):
        return None
    family = socket.AF_INET if len(ends[0]) == 4 else socket.AF_INET6
    wanted = _SOCKET.pack(local[1], remote[1], *ends)
    body = _QUESTION.pack(family, socket.IPPROTO_TCP, 0, 0, _EVERY_STATE) + wanted + _ANY_INTERFACE
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG) as kernel:
            kernel.sendto(_HEADER.pack(_HEADER.size + len(body), _BY_FAMILY, _REQUEST, 0, 0) + body, (0, 0))
            answer = kernel.recv(4096, socket.MSG_DONTWAIT)  # the kernel answers during the call that sends
    except OSError as error:
        if error.errno in _OUT_OF_DESCRIPTORS:
            raise
        return None
    # a program may connect to an IPv4 address through an IPv6 socket
    return _row_of(answer, (wanted, _SOCKET.pack(local[1], remote[1], *map(_as_ipv6, ends))))


def _row_of(answer: bytes, wanted: Sequence[bytes]) -> _Row | None:
    """Return what an answer says about a socket with one of these ports and addresses, if it is about such a one."""
    found = _HEADER.size + _STATE.size
    at = found + _SOCKET.size + len(_ANY_INTERFACE)
    if len(answer) < at + _OWNER.size or _HEADER.unpack_from(answer)[1] != _BY_FAMILY:
        return None
    if answer[found : found + _SOCKET.size] not in wanted or _STATE.unpack_from(answer, _HEADER.size)[1] == _LISTENING:
        return None
    *_, uid, inode = _OWNER.unpack_from(answer, at)
    return _Row(uid, inode)


def _packed(address: Address) -> bytes:
    return ipaddress.ip_address(address[0].partition("%")[0]).packed


def _as_ipv6(packed: bytes) -> bytes:
    return packed if len(packed) == 16 else b"\0" * 10 + b"\xff\xff" + packed


def _search(local: Address, remote: Address) -> _Row | None:
    """Search the tables of all sockets."""
    for table, version in _TABLES:
        ends = [_table_address(address, version) for address in (local, remote)]
        if all(ends) and (row := _find_row(table, f": {ends[0]} {ends[1]} ").split()):
            return _Row(int(row[_UID]), int(row[_INODE]))
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
    """Return an address as the kernel lists it: words in this machine's byte order.

    Empty if the table is that of the other address family.
    """
    packed = _packed(address)
    if version == 6:
        packed = _as_ipv6(packed)
    elif len(packed) == 16:
        packed = b""
    words = (packed[start : start + 4] for start in range(0, len(packed), 4))
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words) + f":{address[1]:04X}" * bool(packed)
