"""A task of Windows' Task Scheduler that starts the server at logon. There is no socket activation."""

import csv
import io
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from app.service.plan import (
    DESCRIPTION,
    NAME,
    ServiceFile,
    ServicePlan,
    ServiceStatus,
    must_run,
    replaced,
    run_tool,
)

_STATUS, _LAST_RUN, _LAST_RESULT = 3, 5, 6  # columns of `schtasks /Query /V /FO CSV`, whose headings are translated
_RUNNING = "267009"  # last result of a task that has not ended: SCHED_S_TASK_RUNNING
_NEVER_RUN = "267011"  # SCHED_S_TASK_HAS_NOT_RUN
_TASK = """\
<?xml version="1.0" encoding="UTF-16"?>
<Task version="1.2" xmlns="http://schemas.microsoft.com/windows/2004/02/mit/task">
  <RegistrationInfo><Description>{description}</Description></RegistrationInfo>
  <Triggers><LogonTrigger><UserId>{user}</UserId></LogonTrigger></Triggers>
  <Principals>
    <Principal id="Author">
      <UserId>{user}</UserId><LogonType>InteractiveToken</LogonType><RunLevel>LeastPrivilege</RunLevel>
    </Principal>
  </Principals>
  <Settings>
    <MultipleInstancesPolicy>IgnoreNew</MultipleInstancesPolicy>
    <DisallowStartIfOnBatteries>false</DisallowStartIfOnBatteries>
    <StopIfGoingOnBatteries>false</StopIfGoingOnBatteries>
    <ExecutionTimeLimit>PT0S</ExecutionTimeLimit>
    <Hidden>true</Hidden>
    <RestartOnFailure><Interval>PT1M</Interval><Count>3</Count></RestartOnFailure>
  </Settings>
  <Actions Context="Author">
    <Exec><Command>{command}</Command><Arguments>{arguments}</Arguments>{folder}</Exec>
  </Actions>
</Task>
"""


class TaskScheduler:
    """The Task Scheduler of Windows."""

    title = "Task Scheduler"
    after_install: Sequence[str] = (
        "The server has started, and starts with each logon. It does not end when it is idle.",
    )

    def __init__(self, plan: ServicePlan, user: str) -> None:
        self._plan = plan
        self._user = user
        self._file = plan.state_dir / "service-task.xml"

    def files(self) -> Sequence[ServiceFile]:
        command, *arguments = self._plan.command
        folder = self._plan.folder
        return [
            ServiceFile(
                self._file,
                _TASK.format(
                    description=escape(DESCRIPTION),
                    user=escape(self._user),
                    command=escape(_without_console(command)),
                    arguments=escape(subprocess.list2cmdline([*arguments, "--quiet"])),
                    folder="" if folder is None else f"<WorkingDirectory>{escape(str(folder))}</WorkingDirectory>",
                ),
                "utf-16",
            )
        ]

    def is_installed(self) -> bool:
        return self._file.exists()

    def install(self) -> None:
        if self.is_installed():
            run_tool("schtasks", "/End", "/TN", NAME)
        self._plan.check_ports()
        with replaced(self.files()):
            must_run("schtasks", "/Create", "/TN", NAME, "/XML", str(self._file), "/F")
        must_run("schtasks", "/Run", "/TN", NAME)

    def remove(self) -> None:
        run_tool("schtasks", "/End", "/TN", NAME)
        must_run("schtasks", "/Delete", "/TN", NAME, "/F")
        self._file.unlink(missing_ok=True)

    def status(self) -> ServiceStatus:
        if not self.is_installed():
            return ServiceStatus(self.title, installed=False)
        shown = must_run("schtasks", "/Query", "/TN", NAME, "/V", "/FO", "CSV", "/NH")
        row = next(csv.reader(io.StringIO(shown)), [])
        state, last_run, result = (
            row[column] if len(row) > column else "" for column in (_STATUS, _LAST_RUN, _LAST_RESULT)
        )
        return ServiceStatus(
            self.title,
            installed=True,
            state=state,
            last_exit="" if result in (_RUNNING, _NEVER_RUN, "") else f"status {result}, started {last_run}",
            files=[self._file],
        )


def _without_console(program: str) -> str:
    """Return the interpreter that opens no window, if the program is a Python interpreter that has one."""
    windowless = Path(program).with_name("pythonw.exe")
    return os.fspath(windowless) if Path(program).name.lower() == "python.exe" and windowless.exists() else program
