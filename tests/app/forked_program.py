"""`ingle` processes that start fast, because they are forked from a process that has already imported the slow modules.

The fork goes through an intermediate process that exits, so that the test process becomes the parent, as if it had
started the program itself.
"""

import atexit
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
IMPORTED = (
    "app.cli",
    "app.server.application",
    "app.models.load.loaded_model",
    "app.models.load.loaded_encoder",
    "engine.backends.cpu.device",
)
_MOST_BYTES = 1 << 20  # maximum size in bytes of a request to the forking process
_SUBREAPER = 36  # prctl option: orphaned descendants become children of this process


class ForkedProgram(subprocess.Popen[str]):
    """An `ingle` process with these arguments. It behaves like one that `subprocess.Popen` started.

    Its standard error is a pipe, and so are its other streams with `subprocess.PIPE`.
    """

    def __init__(
        self, environment: Mapping[str, str], *arguments: str, stdin: int | None = None, stdout: int | None = None
    ) -> None:
        command, errors = ["ingle", *arguments], subprocess.PIPE
        super().__init__(command, cwd=ROOT, env=environment, stdin=stdin, stdout=stdout, stderr=errors, text=True)

    def _execute_child(self, *given: Any) -> None:
        asked = signature(subprocess.Popen._execute_child).bind(self, *given).arguments  # type: ignore[attr-defined]
        request = json.dumps({"arguments": asked["args"], "environment": asked["env"]}).encode()
        standard = [asked[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        line, prctl = _forker(), ctypes.CDLL(None).prctl
        prctl(_SUBREAPER, 1)
        socket.send_fds(line, [request], [mine if mine >= 0 else place for place, mine in enumerate(standard)])
        self.pid = int(line.recv(32))
        prctl(_SUBREAPER, 0)
        self._child_created = True
        for mine in standard:
            if mine >= 0:
                os.close(mine)


@cache
def _forker() -> socket.socket:
    """Return a socket to the forking process, which has imported all slow modules and exits when the socket closes."""
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        command = [sys.executable, "-m", "tests.app.forked_program", str(its.fileno())]
        process = subprocess.Popen(command, cwd=ROOT, pass_fds=[its.fileno()])
    atexit.register(process.wait)
    atexit.register(mine.close)
    return mine


def _wait(line: socket.socket) -> list[str]:
    """Fork a process per request. Returns only in a forked process, with the program's arguments from the request."""
    while True:
        request, standard, *_ = socket.recv_fds(line, _MOST_BYTES, 3)
        if not request:
            os._exit(0)
        number, writer = os.pipe()
        if between := os.fork():
            os.waitpid(between, 0)
            line.send(os.read(number, 32))
            for descriptor in (number, writer, *standard):
                os.close(descriptor)
            continue
        if child := os.fork():
            os.write(writer, str(child).encode())
            os._exit(0)
        for place, descriptor in enumerate(standard):
            os.dup2(descriptor, place)
        for descriptor in (number, writer, line.detach(), *standard):
            os.close(descriptor)
        asked = json.loads(request)
        os.environ.clear()
        os.environ.update(asked["environment"])
        return list(asked["arguments"])


def main() -> int:
    line = socket.socket(fileno=int(sys.argv[1]))
    for name in IMPORTED:
        import_module(name)
    with suppress(KeyboardInterrupt):  # Ctrl-C is meant for the test process only
        sys.argv = _wait(line)
        return int(import_module("app.cli").main())
    return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
