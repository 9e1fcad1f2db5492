"""An agent of launchd, on macOS, with socket activation: the first request starts the server."""

import os
import plistlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app.process.listening import bracketed
from app.process.service_manager import LAUNCHD_SOCKETS
from app.service.plan import (
    STOP_SECONDS,
    ServiceFile,
    ServicePlan,
    ServiceStatus,
    must_run,
    replaced,
    run_tool,
)
from engine.private_folder import private_folder

_LABEL = "org.inglenook.server"
_ERRORS = "service.err"  # file for what the server prints before its log is open; with --quiet, errors only


class Launchd:
    """launchd of this user."""

    title = "launchd"
    after_install: Sequence[str] = ("The first request starts the server. It listens while you are logged in.",)

    def __init__(self, plan: ServicePlan) -> None:
        self._plan = plan
        self._file = Path("~/Library/LaunchAgents").expanduser() / f"{_LABEL}.plist"
        self._errors = plan.state_dir / _ERRORS
        self._domain = f"gui/{os.getuid()}"  # type: ignore[attr-defined,unused-ignore]  # not on Windows

    def files(self) -> Sequence[ServiceFile]:
        return [ServiceFile(self._file, plistlib.dumps(self._agent(), sort_keys=False).decode())]

    def is_installed(self) -> bool:
        return self._file.exists()

    def install(self) -> None:
        was_installed = self.is_installed()
        if was_installed:
            self._unload()
        try:
            self._plan.check_ports()
            private_folder(self._plan.state_dir)
            with replaced(self.files()):
                must_run("launchctl", "bootstrap", self._domain, str(self._file))
        except BaseException:
            if was_installed:
                run_tool("launchctl", "bootstrap", self._domain, str(self._file))
            raise

    def remove(self) -> None:
        self._unload()
        self._file.unlink(missing_ok=True)
        self._errors.unlink(missing_ok=True)

    def status(self) -> ServiceStatus:
        if not self.is_installed():
            return ServiceStatus(self.title, installed=False)
        done = run_tool("launchctl", "print", f"{self._domain}/{_LABEL}")
        values = dict(re.findall(r"^\s*(state|pid|last exit code) = (.*)$", done.stdout, re.MULTILINE))
        last_exit = values.get("last exit code", "")
        agent = plistlib.loads(self._file.read_bytes())
        return ServiceStatus(
            self.title,
            installed=True,
            state="not loaded" if done.returncode else values.get("state", "unknown"),
            pid=int(values["pid"]) if values.get("pid", "").isdecimal() else None,
            socket="not loaded" if done.returncode else "listening",
            addresses=[_address(one) for one in agent.get("Sockets", {}).get(LAUNCHD_SOCKETS, ())],
            last_exit="" if "never" in last_exit else last_exit and f"status {last_exit}",
            files=[self._file],
            logs=f"cat {self._errors}",
        )

    def _unload(self) -> None:
        run_tool("launchctl", "bootout", f"{self._domain}/{_LABEL}")  # fails if it is not loaded

    def _agent(self) -> Mapping[str, Any]:
        plan = self._plan
        return {
            "Label": _LABEL,
            "ProgramArguments": [*plan.command, "--quiet"],
            **({} if plan.folder is None else {"WorkingDirectory": str(plan.folder)}),
            "EnvironmentVariables": dict(plan.variables),
            "Sockets": {
                LAUNCHD_SOCKETS: [
                    {
                        "SockNodeName": address,
                        "SockServiceName": str(port),
                        "SockFamily": "IPv6" if ":" in address else "IPv4",
                        "SockType": "stream",
                    }
                    for address, port in plan.addresses
                ]
            },
            "StandardErrorPath": str(self._errors),
            "ProcessType": "Interactive",  # other types get less of the processor
            "ExitTimeOut": STOP_SECONDS,
            "Umask": 0o077,
        }


def _address(listener: Mapping[str, str]) -> str:
    return f"{bracketed(listener['SockNodeName'])}:{listener['SockServiceName']}"
