"""`ingle service` with systemd: the files of the units, the calls of systemctl, and what is restored after failures."""

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from app.process import listening
from app.service.manager import manager_of, service_has
from app.service.plan import ServicePlan, ServiceUnavailable
from app.service.systemd import Systemd
from app.settings.settings import load_settings
from tests.app.command_line import ingle
from tests.app.service.fake_tools import FakeTools
from tests.support.local_servers import free_port

if sys.platform != "linux":
    pytest.skip("systemd runs on Linux only", allow_module_level=True)

SHOWN = """\
MainPID=0
Result=success
ExecMainExitTimestamp=Sun 2026-11-29 14:02:11 UTC
ExecMainCode=1
ExecMainStatus=0
ActiveState=inactive
SubState=dead

ActiveState=active
SubState=listening
Listen=127.0.0.1:{port} (Stream)
Listen=[::1]:{port} (Stream)
Result=success
"""


class Home:
    """A home with a configuration, and fake tools."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tools = folder, FakeTools.make(folder / "bin", "systemctl")
        self.config = folder / "inglenook" / "config.toml"
        self.config.parent.mkdir()
        self.use_port(free_port())
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("INGLE_", "HF_", "XDG_"))}
        self.environment = {name: "" for name in os.environ if name not in kept}  # an empty variable is not set
        self.environment |= {"PATH": self.tools.path, "XDG_CONFIG_HOME": str(folder)}
        self.units = folder / "systemd" / "user"

    def use_port(self, port: int) -> None:
        self.port = port
        self.config.write_text(f"port = {port}\n")

    def ingle(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        done = ingle(self.environment, *arguments)
        return subprocess.CompletedProcess(arguments, done.returncode, done.stdout.decode(), done.stderr.decode())

    def unit(self, kind: str) -> str:
        return (self.units / f"inglenook.{kind}").read_text()


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def test_install_writes_units_and_enables_the_socket(home: Home) -> None:
    done = home.ingle("service", "install")
    assert done.returncode == 0, done.stderr
    assert home.tools.calls() == [
        "systemctl --user show-environment",
        "systemctl --user daemon-reload",
        "systemctl --user enable --now inglenook.socket",
    ]
    assert f"ListenStream=127.0.0.1:{home.port}\nListenStream=[::1]:{home.port}\n" in home.unit("socket")
    assert f"ExecStart={sys.executable} -m app serve\n" in home.unit("service")
    assert "Type=notify\n" in home.unit("service")
    assert "SuccessExitStatus=130\n" in home.unit("service")
    assert f"Environment=XDG_CONFIG_HOME={home.folder}\n" in home.unit("service")
    assert str(home.port) not in home.unit("service")  # the settings come from config.toml
    assert "loginctl enable-linger" in done.stderr
    assert sorted(file.name for file in home.units.iterdir()) == ["inglenook.service", "inglenook.socket"]


def test_print_shows_the_units_and_changes_nothing(home: Home) -> None:
    done = home.ingle("service", "install", "--print")
    assert done.returncode == 0
    assert f"# {home.units}/inglenook.socket\n[Unit]\n" in done.stdout
    assert f"# {home.units}/inglenook.service\n[Unit]\n" in done.stdout
    assert home.tools.calls() == []
    assert not home.units.exists()


def test_second_install_stops_the_service_and_moves_the_socket(home: Home) -> None:
    home.ingle("service", "install")
    home.tools.forget()
    home.config.write_text("port = 4999\nollama_port = 4998\n")
    assert home.ingle("service", "install").returncode == 0
    assert "systemctl --user stop inglenook.socket inglenook.service" in home.tools.calls()
    assert home.unit("socket").count(":4999\n") == home.unit("socket").count(":4998\n") == 2


def test_remove_stops_the_service_and_deletes_its_files(home: Home) -> None:
    home.ingle("service", "install")
    home.tools.forget()
    done = home.ingle("service", "remove")
    assert (done.returncode, done.stderr) == (0, "The service is removed.\n")
    assert home.tools.calls()[1] == "systemctl --user disable --now inglenook.socket inglenook.service"
    assert "systemctl --user daemon-reload" in home.tools.calls()
    assert list(home.units.iterdir()) == []
    assert home.ingle("service", "remove").returncode == 3


def test_machine_without_systemd_gets_no_files(home: Home) -> None:
    home.tools.answer("show-environment", err="Failed to connect to bus: No medium found\n", status=1)
    done = home.ingle("service", "install")
    assert done.returncode == 1
    assert done.stderr.startswith(
        "error: systemd does not run for this user: Failed to connect to bus: No medium found"
    )
    assert not home.units.exists()
    (home.tools.folder / "systemctl").unlink()
    home.environment["PATH"] = str(home.tools.folder)
    assert home.ingle("service", "install").stderr.startswith("error: systemctl is not on this machine")


def test_failed_install_leaves_no_files(home: Home) -> None:
    home.tools.answer("enable", err="Job failed. See journalctl.\n", status=1)
    done = home.ingle("service", "install")
    assert done.returncode == 1
    assert "enable --now inglenook.socket failed: Job failed." in done.stderr
    assert list(home.units.iterdir()) == []


def test_failed_second_install_restores_the_first_one(home: Home) -> None:
    home.ingle("service", "install")
    before = home.unit("socket")
    home.config.write_text("port = 4999\n")
    home.tools.answer("enable", err="Job failed.\n", status=1)
    assert home.ingle("service", "install").returncode == 1
    assert home.unit("socket") == before
    assert home.tools.calls()[-1] == "systemctl --user start inglenook.socket"


def test_port_of_another_program_is_refused(home: Home) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        home.use_port(other.getsockname()[1])
        done = home.ingle("service", "install")
    assert done.returncode == 1
    assert f"port {home.port} is in use by" in done.stderr
    assert not home.units.exists()


def test_address_from_the_environment_is_refused_and_other_settings_are_named(home: Home) -> None:
    home.environment["INGLE_PORT"] = "4999"
    done = home.ingle("service", "install")
    assert done.returncode == 2
    assert done.stderr.startswith("error: INGLE_PORT is set in this environment, and the service does not see it")
    home.environment |= {"INGLE_PORT": "", "INGLE_MODEL": "qwen3:8b"}
    done = home.ingle("service", "install", "--print")
    assert done.returncode == 0
    assert "INGLE_MODEL is set in this environment" in done.stderr
    assert "qwen3:8b" not in done.stdout


def test_status_reports_state_socket_last_exit_and_logs(home: Home) -> None:
    home.ingle("service", "install")
    home.tools.answer("show", out=SHOWN.format(port=home.port))
    done = home.ingle("service", "status")
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(None, 1) for line in done.stdout.splitlines()[:2])
    assert lines == {"service": "installed (systemd)", "server": "inactive (dead)"}
    assert f"active (listening) on 127.0.0.1:{home.port}, [::1]:{home.port}" in done.stdout
    assert "status 0, Sun 2026-11-29 14:02:11 UTC" in done.stdout
    assert "ingle logs; journalctl --user -u inglenook" in done.stdout
    found = json.loads(home.ingle("service", "status", "--json").stdout)
    assert (found["installed"], found["pid"], found["state"]) == (True, None, "inactive (dead)")


def test_status_warns_if_the_port_of_the_settings_has_changed(home: Home) -> None:
    home.ingle("service", "install")
    home.tools.answer("show", out=SHOWN.format(port=home.port).replace("MainPID=0", "MainPID=77"))
    home.config.write_text("port = 4999\n")
    done = home.ingle("service", "status")
    assert "pid 77" in done.stdout
    assert f"The settings have port 4999, and the service listens on {home.port}." in done.stderr


def test_status_without_a_service_runs_no_tool(home: Home) -> None:
    done = home.ingle("service", "status")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == "No service is installed (systemd).\ntry: ingle service install\n"
    assert home.tools.calls() == []


def test_servers_and_doctor_know_the_port_of_the_service(home: Home) -> None:
    home.ingle("service", "install")
    with socket.create_server(("127.0.0.1", home.port)):
        home.environment["INGLE_OFFLINE"] = "1"
        done = home.ingle("serve", "--model", "smollm2:135m")
        assert f"error: port {home.port} belongs to the service of ingle" in done.stderr
        results = json.loads(home.ingle("doctor", "--json").stdout)
    [port] = [result for result in results if result["name"] == "port"]
    assert port["status"] == "ok"


def test_only_ports_in_its_files_belong_to_the_service(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    home.ingle("service", "install")
    for name, value in home.environment.items():
        monkeypatch.setenv(name, value)
    settings = load_settings()
    assert service_has(home.port, settings)
    assert not service_has(home.port + 1, settings)


def test_addresses_that_this_machine_lacks_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    listen = listening._listen

    def without_ipv6(family: int, address: str, port: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
        return listen(family, address, port)

    plan = ServicePlan.of(load_settings(port=5000))
    assert plan.addresses == [("127.0.0.1", 5000), ("::1", 5000)]
    monkeypatch.setattr(listening, "_listen", without_ipv6)
    assert plan.addresses == [("127.0.0.1", 5000)]


ODD = ["/usr/bin/env", "a b", "c%d", "$HOME", 'q"x\\']


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("words", [ODD, ["/bin/sh", "serve"]])
def test_systemd_accepts_the_units(
    words: list[str], home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = ServicePlan(words, tmp_path, {"HF_HOME": f"{tmp_path}/a %b$"}, "localhost", [4645, 11434], tmp_path)
    folder = tmp_path / "written"
    folder.mkdir()
    for file in Systemd(plan).files():
        (folder / file.path.name).write_text(file.content)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    checked = subprocess.run(
        ["systemd-analyze", "--user", "verify", *map(str, folder.iterdir())],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (checked.returncode, checked.stderr) == (0, "")


def test_special_characters_reach_the_program_unchanged(tmp_path: Path) -> None:
    plan = ServicePlan(ODD, tmp_path, {"HF_HOME": "/a %b$"}, "localhost", [4645], tmp_path)
    _, service = Systemd(plan).files()
    assert 'ExecStart=/usr/bin/env "a b" c%%d "$$HOME" "q\\"x\\\\"\n' in service.content
    assert 'Environment="HF_HOME=/a %%b$"\n' in service.content


def test_path_with_a_line_break_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ServiceUnavailable, match="cannot contain the path"):
        Systemd(ServicePlan(["a\nb"], None, {}, "localhost", [1], tmp_path)).files()


def test_manager_follows_the_platform() -> None:
    titles = [manager_of(load_settings(), platform).title for platform in ("linux", "darwin", "win32")]
    assert titles == ["systemd", "launchd", "Task Scheduler"]
