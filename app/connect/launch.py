"""Starts a client for one process: its environment, its arguments, and files that are removed when it ends."""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from app.connect.connection import Client, Connection, Launcher
from app.errors import AppError
from app.process.signals import available_signals
from app.whole_file import write_whole

_FROM_THE_TERMINAL = ("SIGINT", "SIGQUIT")  # the terminal sends these to the client itself
_FORWARDED = ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
_ENDING = ("SIGINT", "SIGTERM", "SIGHUP")  # signals that end this process if they have ended the client
_OF_SIGNAL = 128  # added to the number of a signal in an exit status
_LOOPBACK = "127.0.0.1,localhost,::1"


class NotInstalled(AppError):
    """The client is not installed."""


class NotLaunchable(AppError):
    """The client reads the address of a server from its settings only."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """The command of one process, without the arguments of the user."""

    command: tuple[str, ...]
    environment: Mapping[str, str]


def find_program(client: Client, environment: Mapping[str, str]) -> str:
    """Return the path of a client's executable. Raises NotInstalled."""
    paths = (shutil.which(program, path=environment.get("PATH")) for program in client.programs)
    if found := next(filter(None, paths), None):
        return found
    raise NotInstalled(
        f"{client.title} is not installed: there is no program {' or '.join(client.programs)}", client.install
    )


def launcher(client: Client) -> Launcher:
    """Return the launch of a client. Raises NotLaunchable if it reads its server from its own settings only."""
    if client.launch is None:
        raise NotLaunchable(f"{client.title} reads its server from its settings only", f"ingle connect {client.name}")
    return client.launch


@contextmanager
def prepared(client: Client, connection: Connection, environment: Mapping[str, str]) -> Iterator[Prepared]:
    """Prepare one process of a client. `environment` is that of this process.

    Its files are in a private folder that is removed after the body. Raises NotInstalled and NotLaunchable.
    """
    launch_of, program = launcher(client), find_program(client, environment)
    with tempfile.TemporaryDirectory(prefix="ingle-with-") as folder:
        launch = launch_of(connection, Path(folder))
        for name, text in launch.files.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, text.encode(), 0o600)
        yield Prepared((program, *launch.arguments), {**without_proxy(environment), **launch.environment})


def without_proxy(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Return an environment in which no proxy is used for this machine."""
    given = environment.get("no_proxy") or environment.get("NO_PROXY")
    hosts = f"{given},{_LOOPBACK}" if given else _LOOPBACK
    return {**environment, "NO_PROXY": hosts, "no_proxy": hosts}


def run_here(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a client in this terminal until it ends. Returns its exit status; negative: the signal that ended it."""
    process: subprocess.Popen[bytes] | None = None
    early: list[int] = []  # signals that arrived before the client was started

    def forward(number: int, frame: FrameType | None) -> None:
        if process is None:
            early.append(number)
        else:
            process.send_signal(number)

    def ignore(number: int, frame: FrameType | None) -> None:
        """Do nothing. Unlike SIG_IGN, the client does not inherit this."""

    shared = _shares_terminal()
    before = {
        number: signal.signal(number, ignore if shared and number.name in _FROM_THE_TERMINAL else forward)
        for number in available_signals(*_FROM_THE_TERMINAL, *_FORWARDED)
    }
    try:
        process = subprocess.Popen(command, env=environment)
        for number in early:
            process.send_signal(number)
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_like(status: int) -> int:
    """End this process by the signal that ended the client, or return the exit status."""
    if status >= 0:
        return status
    if (name := signal.Signals(-status).name) in _ENDING:
        signal.signal(signal.Signals[name], signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return _OF_SIGNAL - status


def _shares_terminal() -> bool:
    """Whether this process is in the foreground of a terminal, which then sends its signals to the client as well."""
    if os.name == "nt":
        return True
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
