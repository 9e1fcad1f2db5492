"""The services of launchd and of Windows' Task Scheduler: their files, and the calls of their tools."""

import plistlib
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from app.process.listening import PortTaken
from app.service.launchd import Launchd
from app.service.plan import ServicePlan, ServiceUnavailable
from app.service.task_scheduler import TaskScheduler
from tests.app.service.fake_tools import FakeTools
from tests.support.local_servers import free_port

if sys.platform == "win32":
    pytest.skip("the fake tools are shell scripts", allow_module_level=True)

NAMESPACE = {"task": "http://schemas.microsoft.com/windows/2004/02/mit/task"}
RUNNING = "org.inglenook.server = {\n\tstate = running\n\tpid = 4711\n\tlast exit code = (never exited)\n}\n"
ENDED = "org.inglenook.server = {\n\tstate = not running\n\tlast exit code = 1\n}\n"


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeTools:
    monkeypatch.setenv("HOME", str(tmp_path))
    tools = FakeTools.make(tmp_path / "bin", "launchctl", "schtasks")
    monkeypatch.setenv("PATH", tools.path)
    return tools


@pytest.fixture
def plan(tmp_path: Path) -> ServicePlan:
    variables = {"HF_HOME": "/a & b"}
    return ServicePlan(["/opt/a b/ingle", "serve"], tmp_path, variables, "localhost", [free_port()], tmp_path / "state")


def test_launchd_gets_an_agent_with_sockets(plan: ServicePlan, tools: FakeTools, tmp_path: Path) -> None:
    manager = Launchd(plan)
    manager.install()
    file = tmp_path / "Library/LaunchAgents/org.inglenook.server.plist"
    assert [call.split()[:2] for call in tools.calls()] == [["launchctl", "bootstrap"]]
    assert tools.calls()[0].endswith(str(file))
    agent = plistlib.loads(file.read_bytes())
    assert agent["ProgramArguments"] == ["/opt/a b/ingle", "serve", "--quiet"]
    assert agent["EnvironmentVariables"] == {"HF_HOME": "/a & b"}
    listeners = agent["Sockets"]["Listeners"]
    assert [one["SockNodeName"] for one in listeners] == ["127.0.0.1", "::1"]
    assert {one["SockServiceName"] for one in listeners} == {str(plan.ports[0])}
    assert "KeepAlive" not in agent
    assert "RunAtLoad" not in agent


def test_launchd_reports_running_and_ended_servers(plan: ServicePlan, tools: FakeTools) -> None:
    manager = Launchd(plan)
    assert not manager.status().installed
    manager.install()
    tools.answer("print", out=RUNNING)
    status = manager.status()
    assert (status.state, status.pid, status.last_exit) == ("running", 4711, "")
    assert list(status.addresses) == [f"127.0.0.1:{plan.ports[0]}", f"[::1]:{plan.ports[0]}"]
    tools.forget()
    tools.answer("print", out=ENDED)
    status = manager.status()
    assert (status.state, status.pid, status.last_exit) == ("not running", None, "status 1")


def test_launchd_agent_is_removed(plan: ServicePlan, tools: FakeTools) -> None:
    manager = Launchd(plan)
    manager.install()
    manager.remove()
    assert tools.calls()[-1].startswith("launchctl bootout gui/")
    assert not manager.is_installed()


def test_failed_install_in_launchd_restores_the_earlier_agent(plan: ServicePlan, tools: FakeTools) -> None:
    manager = Launchd(plan)
    manager.install()
    [before] = [file.path.read_bytes() for file in manager.files()]
    tools.forget()
    tools.answer("bootstrap", err="Bootstrap failed: 5: Input/output error\n", status=5)
    other = Launchd(ServicePlan(["/other", "serve"], None, {}, "localhost", plan.ports, plan.state_dir))
    with pytest.raises(ServiceUnavailable, match="Bootstrap failed: 5"):
        other.install()
    assert manager.files()[0].path.read_bytes() == before
    assert [call.split()[1] for call in tools.calls()] == ["bootout", "bootstrap", "bootstrap"]


def test_task_starts_the_server_at_logon(plan: ServicePlan, tools: FakeTools) -> None:
    manager = TaskScheduler(plan, "PC\\a & b")
    manager.install()
    [file] = manager.files()
    calls = tools.calls()
    assert calls == [f"schtasks /Create /TN inglenook /XML {file.path} /F", "schtasks /Run /TN inglenook"]
    task = ElementTree.fromstring(file.path.read_bytes())  # noqa: S314
    assert task.findtext("task:Triggers/task:LogonTrigger/task:UserId", namespaces=NAMESPACE) == "PC\\a & b"
    assert task.findtext("task:Actions/task:Exec/task:Command", namespaces=NAMESPACE) == "/opt/a b/ingle"
    assert task.findtext("task:Actions/task:Exec/task:Arguments", namespaces=NAMESPACE) == "serve --quiet"
    assert task.findtext("task:Settings/task:ExecutionTimeLimit", namespaces=NAMESPACE) == "PT0S"


def test_task_reports_its_state_and_is_removed(plan: ServicePlan, tools: FakeTools) -> None:
    manager = TaskScheduler(plan, "me")
    assert not manager.status().installed
    manager.install()
    tools.answer("/Query", out='"PC","\\inglenook","N/A","Bereit","Interaktiv","29.11.2026 14:02:11","1"\n')
    status = manager.status()
    assert (status.state, status.last_exit, status.socket) == ("Bereit", "status 1, started 29.11.2026 14:02:11", "")
    manager.remove()
    assert tools.calls()[-2:] == ["schtasks /End /TN inglenook", "schtasks /Delete /TN inglenook /F"]
    assert not manager.is_installed()


def test_refused_task_leaves_no_file(plan: ServicePlan, tools: FakeTools) -> None:
    tools.answer("/Create", err="ERROR: Access is denied.\n", status=1)
    manager = TaskScheduler(plan, "me")
    with pytest.raises(ServiceUnavailable, match="Access is denied"):
        manager.install()
    assert not manager.is_installed()


def test_port_in_use_stops_the_install(plan: ServicePlan, tools: FakeTools) -> None:
    program = f"import socket; s = socket.create_server(('127.0.0.1', {plan.ports[0]})); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(PortTaken):
            Launchd(plan).install()
        other.kill()
    assert tools.calls() == []
