"""Refuse connections to other machines, in the tests and in the Python programs that they start.

Python imports this module when a program starts, because the tests put its folder on PYTHONPATH. Addresses that were
refused are appended to the file that LOG names, so that a program cannot hide them by handling the error.
"""

import ipaddress
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

LOG = "INGLE_TEST_REFUSED_CONNECTIONS"


def install() -> None:
    """Guard the sockets of this process."""
    for name in ("connect", "connect_ex"):
        setattr(socket.socket, name, _guarded(getattr(socket.socket, name)))


def _guarded(connect: Callable[[socket.socket, Any], Any]) -> Callable[[socket.socket, Any], Any]:
    def connect_here(self: socket.socket, address: Any) -> Any:
        log = os.environ.get(LOG)
        is_remote = self.family in (socket.AF_INET, socket.AF_INET6) and not _is_this_machine(str(address[0]))
        if log is None or not is_remote:
            return connect(self, address)
        with open(log, "a", encoding="utf-8") as file:
            file.write(f"{address} by {sys.orig_argv}\n")
        raise ConnectionRefusedError(f"tests may not connect to {address}")

    return connect_here


def _is_this_machine(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host == "localhost"
    address = getattr(address, "ipv4_mapped", None) or address  # before Python 3.13, mapped addresses are no loopback
    return address.is_loopback or address.is_unspecified


@contextmanager
def lifted() -> Iterator[None]:
    """Allow connections of this process and of programs that start meanwhile."""
    log = os.environ.pop(LOG, None)
    try:
        yield
    finally:
        if log is not None:
            os.environ[LOG] = log


if __name__ == "sitecustomize" and os.environ.get(LOG):
    install()
