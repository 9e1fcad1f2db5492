"""A server that a service manager starts for the first request: it serves it, ends when idle, and starts again."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.support.processes import HANGING_SECONDS, Started, until

ROOT = Path(__file__).parents[3]
QUESTION = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0}


class Service:
    """The stand-in for systemd, its port, and what it has recorded."""

    def __init__(self, port: int, record: Path, notified: socket.socket, environment: Mapping[str, str]) -> None:
        self.url, self._record, self._notified = f"http://127.0.0.1:{port}", record, notified
        self._environment = {**environment, "INGLE_PORT": str(port)}
        self._port = port

    def record(self) -> list[str]:
        """Return the recorded starts and ends, without process ids."""
        lines = self._record.read_text().splitlines() if self._record.exists() else []
        return ["started" if line.startswith("started") else line for line in lines]

    def states(self) -> list[str]:
        """Return the states that the server has reported since the last call."""
        self._notified.setblocking(False)
        states = []
        while True:
            try:
                states.append(self._notified.recv(100).decode())
            except BlockingIOError:
                return states

    def ask(self) -> str:
        reply = httpx.post(f"{self.url}/v1/chat/completions", json=QUESTION, timeout=HANGING_SECONDS, trust_env=False)
        assert reply.status_code == 200, reply.text
        return str(reply.json()["choices"][0]["message"]["content"])

    def run(self, *arguments: str) -> str:
        """Run a command of this user, and return its output."""
        command = [sys.executable, "-m", "app", *arguments]
        done = subprocess.run(command, cwd=ROOT, env=self._environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def connect_until(self, count: int) -> int:
        """Connect again and again until the server has ended `count` times. Returns the number of connections."""
        made = 0
        ended = threading.Event()

        def wait() -> None:
            until(lambda: sum(line.startswith("ended") for line in self.record()) == count)
            ended.set()

        threading.Thread(target=wait, daemon=True).start()
        while not ended.wait(0.005):
            socket.create_connection(("127.0.0.1", self._port)).close()  # raises if it is refused
            made += 1
        return made


@contextmanager
def service(model: Path, folder: Path, *options: str) -> Iterator[Service]:
    (folder / "inglenook").mkdir()
    (folder / "inglenook/config.toml").write_text(f'model = "{model}"\ncontext = 1024\nkv_disk_gb = 0\n')
    own = {"XDG_CONFIG_HOME": str(folder), "INGLE_STATE_DIR": str(folder / "state"), "INGLE_OFFLINE": "1"}
    own |= {"NOTIFY_SOCKET": str(folder / "notify")}
    command = [sys.executable, "-m", "tests.app.socket_activator", str(folder / "record")]
    command += [sys.executable, "-m", "app", "serve", *options]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.bind(own["NOTIFY_SOCKET"])
        with Started(command, cwd=ROOT, env=os.environ | own, stdout=subprocess.PIPE, text=True) as manager:
            assert manager.stdout is not None
            try:
                port = int(manager.stdout.readline())
                unit = folder / "systemd/user/inglenook.socket"
                unit.parent.mkdir(parents=True)
                unit.write_text(f"[Socket]\nListenStream=127.0.0.1:{port}\n")
                yield Service(port, folder / "record", notified, os.environ | own)
            finally:
                manager.terminate()


def test_first_request_starts_the_server_and_idleness_ends_it(smollm2: Path, cpu_kernels: Path, tmp_path: Path) -> None:
    with service(smollm2, tmp_path, "--idle-exit", "1s") as activated:
        assert activated.record() == []
        first = activated.ask()
        assert activated.record() == ["started"]
        assert activated.states() == ["READY=1"]
        assert activated.connect_until(1) > 0
        assert activated.record()[:2] == ["started", "ended 0"]
        assert "STOPPING=1" in activated.states()
        assert activated.ask() == first


def test_commands_use_an_idle_service_instead_of_a_second_server(
    smollm2: Path, cpu_kernels: Path, tmp_path: Path
) -> None:
    with service(smollm2, tmp_path) as activated:
        assert activated.run("run", "--max-tokens", "4", "Hello")
        assert activated.record() == ["started"]
        assert activated.run("open", "--print").strip() == f"{activated.url}/"
        assert len(json.loads(activated.run("ps", "--json"))) == 1


def test_opening_the_page_starts_an_idle_service(smollm2: Path, cpu_kernels: Path, tmp_path: Path) -> None:
    with service(smollm2, tmp_path) as activated:
        assert activated.run("open", "--print").strip() == f"{activated.url}/"
        assert activated.record() == ["started"]


def test_service_without_an_idle_time_stays_and_stops_cleanly(smollm2: Path, cpu_kernels: Path, tmp_path: Path) -> None:
    with service(smollm2, tmp_path) as activated:
        activated.ask()
        [line] = (tmp_path / "record").read_text().splitlines()
        subprocess.run(["kill", line.split()[1]], check=True)
        until(lambda: activated.record() == ["started", "ended 0"])


def test_sockets_that_other_machines_reach_need_a_key(tmp_path: Path) -> None:
    with socket.create_server(("0.0.0.0", 0)) as opened:  # noqa: S104
        adopt = f"import os; os.dup2({opened.fileno()}, 3); os.environ['LISTEN_PID'] = str(os.getpid())"
        program = (
            f"{adopt}; os.set_inheritable(3, True); os.execv({sys.executable!r}, ['python', '-m', 'app', 'serve'])"
        )
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env=os.environ | {"LISTEN_FDS": "1", "XDG_CONFIG_HOME": str(tmp_path)},
            pass_fds=[opened.fileno()],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 2, done.stderr
    assert "0.0.0.0 accepts other machines, and no API key is set" in done.stderr
