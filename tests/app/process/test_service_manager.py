"""Sockets and notifications of service managers: systemd's variables, and launchd's function."""

import ctypes
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from app.errors import AppError
from app.process import service_manager
from app.process.listening import ListeningSockets
from app.process.service_manager import LAUNCHD_SOCKETS, ServiceManager, launchd_descriptors

ROOT = Path(__file__).parents[3]
ADOPT = """
import os
os.environ["LISTEN_PID"] = str(os.getpid() {offset})
from app.process.service_manager import ServiceManager
manager = ServiceManager.take()
print([one.getsockname()[1] for one in manager.sockets], [one.get_inheritable() for one in manager.sockets])
print([one.proto for one in manager.sockets], [name for name in os.environ if name.startswith("LISTEN_")])
"""


def adopt(passed: Sequence[socket.socket], offset: str = "") -> "subprocess.CompletedProcess[str]":
    """Run a process that adopts the sockets, which have the descriptors 3 and following there."""

    def move() -> None:
        copies = [os.dup(one.fileno()) for one in passed]
        high = [os.dup2(copy, 50 + place) for place, copy in enumerate(copies)]
        for place, copy in enumerate(high):
            os.dup2(copy, 3 + place, inheritable=True)

    return subprocess.run(
        [sys.executable, "-c", ADOPT.format(offset=offset)],
        cwd=ROOT, env={**os.environ, "LISTEN_FDS": str(len(passed)), "LISTEN_FDNAMES": "a:b"}, preexec_fn=move,
        close_fds=False, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_sockets_of_systemd_are_adopted_and_not_inherited() -> None:
    with closing(ListeningSockets(0)) as opened:
        done = adopt(opened.sockets)
    port = opened.port
    assert done.stdout.splitlines() == [f"{[port, port]} [False, False]", "[6, 6] []"], done.stderr


def test_variables_of_another_process_are_ignored() -> None:
    with closing(ListeningSockets(0)) as opened:
        done = adopt(opened.sockets, "+ 1")
    assert done.stdout.splitlines() == ["[] []", "[] []"], done.stderr


def test_descriptors_that_do_not_listen_are_refused() -> None:
    pair = socket.socketpair()
    with socket.socket() as idle, pair[0], pair[1]:
        for one in (idle, pair[0]):
            assert "descriptor 3, which does not listen for TCP connections" in adopt([one]).stderr
    with pytest.raises(AppError, match="which is not a socket"), open(os.devnull) as file:
        service_manager._adopted(file.fileno())


def test_main_port_is_that_of_the_settings_if_a_socket_has_it() -> None:
    with closing(ListeningSockets(0)) as first, closing(ListeningSockets(0)) as second:
        both = [*first.sockets, *second.sockets]
        assert ListeningSockets(second.port, adopted=both).port == second.port
        assert ListeningSockets(1, adopted=both).port == first.port
        assert ListeningSockets(1, adopted=both).addresses == ["127.0.0.1", "::1"] * 2


@pytest.mark.parametrize("is_abstract", [False, True])
def test_states_are_sent_to_the_notification_socket(
    is_abstract: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"{tmp_path}/notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind("\0" + path[1:] if is_abstract else path)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + path[1:] if is_abstract else path)
        manager = ServiceManager.take()
        manager.notify("READY=1")
        assert receiver.recv(100) == b"READY=1"
    assert "NOTIFY_SOCKET" not in os.environ
    manager.notify("STOPPING=1")  # the manager has ended
    ServiceManager().notify("READY=1")


class SystemLibrary:
    """launchd's function, called through ctypes, and `free` of the C library."""

    def __init__(self, descriptors: Sequence[int] | None) -> None:
        libc = ctypes.CDLL(None)
        libc.malloc.restype = ctypes.c_void_p
        self.freed: list[int] = []
        pointer = ctypes.POINTER(ctypes.c_int)

        def activate(name: bytes, found: Any, count: Any) -> int:
            if descriptors is None or name != LAUNCHD_SOCKETS.encode():
                return 3  # ESRCH: launchd did not start this process
            memory = ctypes.cast(libc.malloc(4 * len(descriptors)), pointer)
            for place, descriptor in enumerate(descriptors):
                memory[place] = descriptor
            found[0], count[0] = memory, len(descriptors)
            return 0

        signature = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(pointer), ctypes.POINTER(ctypes.c_size_t)
        )
        self.launch_activate_socket = signature(activate)

    def free(self, memory: Any) -> None:
        self.freed.append(ctypes.addressof(memory.contents))


def test_sockets_of_launchd_are_found() -> None:
    library = SystemLibrary([7, 9])
    assert list(launchd_descriptors(library)) == [7, 9]
    assert len(library.freed) == 1


def test_process_that_launchd_did_not_start_has_no_sockets() -> None:
    library = SystemLibrary(None)
    assert list(launchd_descriptors(library)) == []
    assert library.freed == []
