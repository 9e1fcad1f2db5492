"""A user unit of systemd with socket activation: the first request starts the server, and an idle server ends."""

import re
from collections.abc import Mapping, Sequence

import platformdirs

from app.errors import EXIT_INTERRUPTED
from app.process.listening import bracketed
from app.service.plan import (
    DESCRIPTION,
    NAME,
    STOP_SECONDS,
    ServiceFile,
    ServicePlan,
    ServiceStatus,
    ServiceUnavailable,
    must_run,
    replaced,
    run_tool,
)

_SOCKET, _SERVICE = f"{NAME}.socket", f"{NAME}.service"
_SYSTEMCTL = ("systemctl", "--user")
_SHOWN = (
    "ActiveState", "SubState", "Result", "ExecMainCode", "ExecMainStatus", "ExecMainExitTimestamp", "MainPID", "Listen"
)  # fmt: skip
_KILLED = ("2", "3")  # values of ExecMainCode: a signal ended the process
_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")  # words that need no quotes

Section = Sequence[tuple[str, object]]


class Systemd:
    """systemd of this user."""

    title = "systemd"
    after_install: Sequence[str] = (
        "The first request starts the server. It listens from your first login on.",
        "For a server without a login: loginctl enable-linger",
    )

    def __init__(self, plan: ServicePlan) -> None:
        self._plan = plan
        self._folder = platformdirs.user_config_path() / "systemd" / "user"

    def files(self) -> Sequence[ServiceFile]:
        return [
            ServiceFile(self._folder / _SOCKET, _unit(self._socket())),
            ServiceFile(self._folder / _SERVICE, _unit(self._service())),
        ]

    def is_installed(self) -> bool:
        return (self._folder / _SOCKET).exists()

    def install(self) -> None:
        self._check()
        was_installed = self.is_installed()
        if was_installed:  # the socket may move to another port
            must_run(*_SYSTEMCTL, "stop", _SOCKET, _SERVICE)
        try:
            self._plan.check_ports()
            with replaced(self.files()):
                must_run(*_SYSTEMCTL, "daemon-reload")
                must_run(*_SYSTEMCTL, "enable", "--now", _SOCKET)
        except BaseException:
            run_tool(*_SYSTEMCTL, "daemon-reload")
            if was_installed:
                run_tool(*_SYSTEMCTL, "start", _SOCKET)
            raise

    def remove(self) -> None:
        self._check()
        must_run(*_SYSTEMCTL, "disable", "--now", _SOCKET, _SERVICE)
        for file in self.files():
            file.path.unlink(missing_ok=True)
        must_run(*_SYSTEMCTL, "daemon-reload")
        run_tool(*_SYSTEMCTL, "reset-failed", _SOCKET, _SERVICE)  # fails if neither has failed

    def status(self) -> ServiceStatus:
        if not self.is_installed():
            return ServiceStatus(self.title, installed=False)
        self._check()
        shown = must_run(*_SYSTEMCTL, "show", _SERVICE, _SOCKET, f"--property={','.join(_SHOWN)}")
        service, socket = map(_properties, f"{shown.strip()}\n\n".split("\n\n")[:2])
        return ServiceStatus(
            self.title,
            installed=True,
            state=_state(service),
            pid=int(service.get("MainPID", 0)) or None,
            socket=_state(socket),
            addresses=[address.split()[0] for address in socket.get("Listen", "").splitlines() if address],
            last_exit=_last_exit(service),
            files=[file.path for file in self.files()],
            logs=f"journalctl --user -u {NAME}",
        )

    def _check(self) -> None:
        """Raise ServiceUnavailable if systemd does not run for this user."""
        if (done := run_tool(*_SYSTEMCTL, "show-environment")).returncode:
            said = (done.stderr.strip() or "it does not answer").splitlines()[0]
            raise ServiceUnavailable(
                f"systemd does not run for this user: {said}",
                "Start the server with ingle serve; ingle service install --print shows the files of a service.",
            )

    def _socket(self) -> Mapping[str, Section]:
        streams = [f"{bracketed(address)}:{port}" for address, port in self._plan.addresses]
        return {
            "Unit": [("Description", f"Socket of {DESCRIPTION}")],
            "Socket": [*(("ListenStream", stream) for stream in streams), ("BindIPv6Only", "ipv6-only")],
            "Install": [("WantedBy", "sockets.target")],
        }

    def _service(self) -> Mapping[str, Section]:
        plan = self._plan
        folder = [] if plan.folder is None else [("WorkingDirectory", _literal(str(plan.folder)))]
        return {
            "Unit": [
                ("Description", DESCRIPTION),
                ("Requires", _SOCKET),
                ("After", _SOCKET),
                ("StartLimitIntervalSec", 60),
                ("StartLimitBurst", 5),
            ],
            "Service": [
                ("Type", "notify"),
                *folder,
                *(("Environment", _quoted(f"{name}={value}")) for name, value in plan.variables.items()),
                ("ExecStart", " ".join(_quoted(word).replace("$", "$$") for word in plan.command)),
                ("TimeoutStartSec", "infinity"),  # the model may have to be downloaded first
                ("TimeoutStopSec", STOP_SECONDS),
                ("KillMode", "mixed"),
                ("Restart", "on-failure"),
                ("SuccessExitStatus", EXIT_INTERRUPTED),  # stopped while the model loads
                ("RestartPreventExitStatus", "2 3 4"),  # a wrong setting, an unknown model, a full disk
                ("UMask", "0077"),
            ],
        }


def _unit(sections: Mapping[str, Section]) -> str:
    """Return the text of a unit file."""
    blocks = [
        "\n".join([f"[{name}]", *(f"{key}={value}" for key, value in section)]) for name, section in sections.items()
    ]
    return "\n\n".join(blocks) + "\n"


def _quoted(word: str) -> str:
    """Return a word of a command line or an assignment, quoted if necessary."""
    literal = _literal(word)
    return literal if _PLAIN.fullmatch(literal) else '"{}"'.format(literal.replace("\\", "\\\\").replace('"', '\\"'))


def _literal(text: str) -> str:
    if "\n" in text:
        raise ServiceUnavailable(f"a unit file cannot contain the path {text!r}")
    return text.replace("%", "%%")


def _properties(shown: str) -> dict[str, str]:
    """Parse the properties of one unit. A property with several lines, such as Listen, keeps all of them."""
    properties: dict[str, str] = {}
    for line in shown.splitlines():
        key, _, value = line.partition("=")
        properties[key] = f"{properties[key]}\n{value}" if key in properties else value
    return properties


def _state(unit: Mapping[str, str]) -> str:
    state, detail = unit.get("ActiveState", "unknown"), unit.get("SubState", "")
    result = unit.get("Result", "success")
    return f"{state} ({detail if result == 'success' else result})" if detail else state


def _last_exit(service: Mapping[str, str]) -> str:
    if not (ended := service.get("ExecMainExitTimestamp", "")):
        return ""
    how = "signal" if service.get("ExecMainCode") in _KILLED else "status"
    return f"{how} {service.get('ExecMainStatus', '')}, {ended}"
