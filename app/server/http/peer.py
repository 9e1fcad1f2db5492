"""Which user of this machine is at the other end of a connection over loopback. Linux tells; elsewhere nobody knows.

The system lists every TCP socket with its owner. The one that is looked for has exactly the two addresses and the two
ports of the connection, and is still held by its program, even if that has closed its half of the connection. Sockets
that no program holds are listed without an inode, and as root's. What is not found is not this user's.
"""

import errno
import ipaddress
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

Address = tuple[str, int]

_TABLES = ((Path("/proc/net/tcp"), 4), (Path("/proc/net/tcp6"), 6))
_UID, _INODE = 7, 9  # columns
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
# Whom the kernel does not know by a number here, it lists under this one.
_NOBODY = 65534


@dataclass(slots=True)
class Peer:
    """The other end of one connection."""

    address: Address | None  # its own
    server: Address | None  # ours
    _is_own: bool | None = field(default=None, init=False)

    def is_this_user(self) -> bool:
        """Whether the program there is certainly of the user that this process runs as. Looked up once. Raises OSError
        if there is no file descriptor left to find out."""
        if self._is_own is None:
            self._is_own = self._looked_up()
        return self._is_own

    def is_open(self) -> bool:
        """Whether a program there certainly holds the connection. Looked up each time; raises as `is_this_user`."""
        return self._owner() is not None

    def _looked_up(self) -> bool:
        uid = self._owner()
        return uid is not None and uid == os.geteuid() and uid != _NOBODY

    def _owner(self) -> int | None:
        if sys.platform != "linux" or self.address is None or self.server is None:
            return None
        return owner_of(self.address, self.server)


def owner_of(local: Address, remote: Address) -> int | None:
    """The user id of this machine's socket from `local` to `remote` that a program holds; None if there is none. Raises
    OSError if there is no file descriptor left to find out."""
    for table, version in _TABLES:
        ends = [_in_table(address, version) for address in (local, remote)]
        if all(ends) and (row := _row(table, f": {ends[0]} {ends[1]} ").split()) and row[_INODE] != "0":
            return int(row[_UID])
    return None


def _row(table: Path, wanted: str) -> str:
    try:
        rows = table.read_text(encoding="ascii")
    except OSError as error:
        if error.errno in _OUT_OF_DESCRIPTORS:
            raise
        return ""
    place = rows.find(wanted)
    return "" if place < 0 else rows[rows.rfind("\n", 0, place) + 1 :].partition("\n")[0]


def _in_table(address: Address, version: int) -> str:
    """An address as the kernel lists it: words in this machine's byte order. Empty in the table of another family.

    A program may have reached an IPv4 address through a socket of IPv6, which lists it as one that is mapped.
    """
    host = ipaddress.ip_address(address[0].partition("%")[0])
    if version == 4:
        packed = host.packed if host.version == 4 else b""
    else:
        packed = host.packed if host.version == 6 else b"\0" * 10 + b"\xff\xff" + host.packed
    words = (packed[at : at + 4] for at in range(0, len(packed), 4))
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words) + f":{address[1]:04X}" * bool(packed)
