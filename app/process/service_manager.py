"""The hand-over from a service manager to this process: listening sockets, and an address for notifications.

systemd passes both in environment variables (sd_listen_fds(3), sd_notify(3)). launchd passes sockets through a function
of the system library (launch_activate_socket(3)). The manager keeps the sockets open after this process ends, and
starts it again when a client connects.
"""

import ctypes
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from app.errors import AppError
from app.settings.settings import take_variable

LAUNCHD_SOCKETS = "Listeners"  # key of the sockets in the property list
_FIRST_DESCRIPTOR = 3  # SD_LISTEN_FDS_START
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


@dataclass(frozen=True, slots=True)
class ServiceManager:
    """The service manager that started this process. Without one, there are no sockets, and `notify` does nothing."""

    sockets: Sequence[socket.socket] = ()
    address: str = ""  # path of the notification socket; a leading @ means a zero byte

    @classmethod
    def take(cls) -> "ServiceManager":
        """Take over what was handed to this process, so that child processes do not inherit it. Call it once.

        Raises AppError if a socket does not listen for TCP connections.
        """
        address = take_variable("NOTIFY_SOCKET") or ""
        descriptors = _systemd_descriptors()
        if not descriptors and sys.platform == "darwin":
            descriptors = launchd_descriptors(ctypes.CDLL(None))
        return cls([_adopted(descriptor) for descriptor in descriptors], address)

    def notify(self, state: str) -> None:
        """Send a state such as "READY=1". A manager that does not answer is ignored."""
        if not self.address:
            return
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(state.encode(), "\0" + self.address[1:] if self.address[0] == "@" else self.address)


def _systemd_descriptors() -> Sequence[int]:
    pid, count, _ = take_variable("LISTEN_PID"), take_variable("LISTEN_FDS"), take_variable("LISTEN_FDNAMES")
    if pid != str(os.getpid()) or not (count or "").isdecimal():  # the variables of another process
        return ()
    return range(_FIRST_DESCRIPTOR, _FIRST_DESCRIPTOR + int(count or 0))


def launchd_descriptors(library: Any) -> Sequence[int]:
    """Return the descriptors of the sockets from launchd; none if launchd did not start this process.

    `library`: the system library.
    """
    found, count = ctypes.POINTER(ctypes.c_int)(), ctypes.c_size_t()
    if library.launch_activate_socket(LAUNCHD_SOCKETS.encode(), ctypes.byref(found), ctypes.byref(count)):
        return ()
    descriptors = found[: count.value]
    library.free(found)
    return descriptors


def _adopted(descriptor: int) -> socket.socket:
    try:
        passed = socket.socket(fileno=descriptor)
    except OSError as problem:
        raise AppError(f"the service manager passed descriptor {descriptor}, which is not a socket") from problem
    if passed.family not in _FAMILIES or not passed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        raise AppError(f"the service manager passed descriptor {descriptor}, which does not listen for TCP connections")
    passed.set_inheritable(False)
    # Without IPPROTO_TCP, asyncio leaves Nagle's algorithm on. Only Linux reports the protocol of a socket.
    return socket.socket(passed.family, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=passed.detach())
