"""A stand-in for systemd's socket activation: `python -m tests.app.socket_activator RECORD COMMAND...`.

Listens on a free port, and starts the command each time a client connects while it does not run. The command gets the
listening socket as descriptor 3. The port is printed first. RECORD gets a line each time the command ends, with its
status, and each time it starts.
"""

import os
import select
import signal
import socket
import sys
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

FIRST_DESCRIPTOR = 3


def activate(listener: socket.socket, record: Path, command: list[str]) -> None:
    """Start the command for each first connection, until this process is ended."""
    while True:
        select.select([listener], [], [])
        pid = os.fork()
        if not pid:
            _execute(listener, command)
        signal.signal(signal.SIGTERM, partial(_end, pid))
        _write(record, f"started {pid}")
        _write(record, f"ended {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _execute(listener: socket.socket, command: list[str]) -> NoReturn:
    os.dup2(listener.fileno(), FIRST_DESCRIPTOR)
    os.set_inheritable(FIRST_DESCRIPTOR, True)  # also if the listener has this descriptor already
    own = {"LISTEN_FDS": "1", "LISTEN_PID": str(os.getpid()), "LISTEN_FDNAMES": "inglenook.socket"}
    os.execvpe(command[0], command, {**os.environ, **own})  # noqa: S606


def _end(pid: int, number: int, frame: FrameType | None) -> NoReturn:
    """End the running command, and then this process."""
    os.kill(pid, signal.SIGTERM)
    os.waitpid(pid, 0)
    sys.exit()


def _write(record: Path, line: str) -> None:
    with record.open("a") as file:
        file.write(f"{line}\n")


if __name__ == "__main__":
    opened = socket.create_server(("127.0.0.1", 0))
    print(opened.getsockname()[1], flush=True)
    activate(opened, Path(sys.argv[1]), sys.argv[2:])
