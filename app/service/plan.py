"""The command that a service runs, and the common parts of service managers: files, tools, and status reports."""

import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from app.errors import AppError
from app.process.listening import ListeningSockets, addresses_of
from app.settings.settings import Settings, folder_variables
from app.whole_file import write_whole
from engine.private_folder import private_folder

NAME = "inglenook"
DESCRIPTION = "Inglenook, a server for language models"
STOP_SECONDS = 20  # seconds after which a manager kills a server that it has told to stop
_ROOT = Path(__file__).parents[2]  # the folder that contains the package `app`
_TOOL_SECONDS = 60.0
_MODE = 0o644


class ServiceUnavailable(AppError):
    """The service manager does not run on this machine, or refused."""


@dataclass(frozen=True, slots=True)
class ServiceFile:
    """A file of a service manager."""

    path: Path
    content: str
    encoding: str = "utf-8"


@dataclass(frozen=True, slots=True)
class ServicePlan:
    """A command that serves, its environment, and the addresses on which it is reached."""

    command: Sequence[str]
    folder: Path | None  # working folder of the command; None: any
    variables: Mapping[str, str]
    host: str
    ports: Sequence[int]
    state_dir: Path

    @classmethod
    def of(cls, settings: Settings) -> "ServicePlan":
        command, folder = _program()
        ports = [port for port in (settings.port, settings.ollama_port) if port]
        return cls(command, folder, folder_variables(), settings.host, ports, settings.state_dir)

    @property
    def addresses(self) -> Sequence[tuple[str, int]]:
        """The addresses to listen on. Loopback addresses of IPv6 are left out on a machine that has none."""
        with closing(ListeningSockets(0, self.host)) as possible:
            found = set(possible.addresses)
        return [(one, port) for port in self.ports for one in addresses_of(self.host) if one in found]

    def check_ports(self) -> None:
        """Raise PortTaken if another program listens on a port of the service."""
        for port in self.ports:
            ListeningSockets(port, self.host).close()


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """A service, as its manager reports it."""

    manager: str
    installed: bool
    state: str = ""  # state of the server, in the words of the manager
    pid: int | None = None
    socket: str = ""  # state of the socket, in the words of the manager; empty: the manager holds none
    addresses: Sequence[str] = ()  # addresses on which the manager listens
    last_exit: str = ""  # how the server ended the last time; empty: it has not
    files: Sequence[Path] = ()
    logs: str = ""  # a command that shows what the server has printed


class Manager(Protocol):
    """A service manager, and the service of this user in it."""

    title: str
    after_install: Sequence[str]  # lines for the user

    def files(self) -> Sequence[ServiceFile]:
        """Return the files that `install` writes."""
        ...

    def is_installed(self) -> bool:
        """Whether the service is installed, by its files."""
        ...

    def install(self) -> None:
        """Install the service, or replace it. Raises ServiceUnavailable or PortTaken, and then changes nothing."""
        ...

    def remove(self) -> None:
        """Stop the service, and remove it with its files. Raises ServiceUnavailable."""
        ...

    def status(self) -> ServiceStatus:
        """Return the state of the service. Raises ServiceUnavailable."""
        ...


@contextmanager
def replaced(files: Sequence[ServiceFile]) -> Iterator[None]:
    """Write the files, each atomically. If the body fails, restore those that were there before."""
    before = {file.path: file.path.read_bytes() if file.path.exists() else None for file in files}
    try:
        for file in files:
            private_folder(file.path.parent)
            write_whole(file.path, file.content.encode(file.encoding), _MODE)
        yield
    except BaseException:
        for path, content in before.items():
            if content is None:
                path.unlink(missing_ok=True)
            else:
                write_whole(path, content, _MODE)
        raise


def run_tool(*command: str) -> "subprocess.CompletedProcess[str]":
    """Run a tool of a service manager. Raises ServiceUnavailable if it is missing."""
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_TOOL_SECONDS,
            check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise ServiceUnavailable(f"{command[0]} is not on this machine", _OTHER_WAYS) from None
    except subprocess.TimeoutExpired:
        raise ServiceUnavailable(f"{' '.join(command)} did not end within {_TOOL_SECONDS:.0f} s") from None


def must_run(*command: str) -> str:
    """Run a tool, and return its output. Raises ServiceUnavailable with its message if it fails."""
    done = run_tool(*command)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or f"status {done.returncode}").splitlines()
        raise ServiceUnavailable(f"{' '.join(command)} failed: {said[0]}", _OTHER_WAYS)
    return done.stdout


_OTHER_WAYS = "Start the server with ingle serve; ingle service install --print shows the files of a service."


def _program() -> tuple[Sequence[str], Path | None]:
    """Return the command that serves, and its working folder: the installed program, or this checkout."""
    script = Path(sysconfig.get_path("scripts"), "ingle.exe" if sys.platform == "win32" else "ingle")
    if _ROOT.name == NAME and script.exists():
        return [str(script), "serve"], None
    return [sys.executable, "-m", "app", "serve"], _ROOT
