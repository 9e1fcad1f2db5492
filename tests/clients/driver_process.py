"""Run a client's driver in a separate process with a time limit, and read the outcomes that it prints."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.clients.environments import Installed
from tests.clients.servers import Server
from tests.clients.table import Client

ROOT = Path(__file__).parents[2]
# time limit in case a driver hangs: for all cases of a library together, and for each case of an agent
LIBRARY_SECONDS = 240
AGENT_SECONDS = 150

# Variables that disable telemetry, updates, and downloads, in addition to the settings of each client.
OFFLINE_ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "DISABLE_TELEMETRY": "1",
    "OTEL_SDK_DISABLED": "true",
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "NO_COLOR": "1",
    "NO_UPDATE_NOTIFIER": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONNOUSERSITE": "1",
}


@dataclass(frozen=True)
class Outcome:
    """The outcome of one case with one client."""

    ok: bool
    detail: str  # the reply, or the description of the failure


def run_driver(
    client: Client, installed: Installed, server: Server, folder: Path, cases: Sequence[str]
) -> Mapping[str, Outcome]:
    """Run cases in `folder` and return their outcomes. HOME is the folder `home` next to `folder`.

    If the driver hangs or exits during a case, this case fails, and the driver starts again with the next case.
    """
    outcomes: dict[str, Outcome] = {}
    while remaining := [case for case in cases if case not in outcomes]:
        limit = AGENT_SECONDS * len(remaining) if _is_agent(client) else LIBRARY_SECONDS
        output, failure = _run(
            _command(client, installed, server, remaining), _environment(installed, folder), folder, limit
        )
        outcomes.update(_outcomes(output))
        if missing := [case for case in remaining if case not in outcomes]:
            outcomes[missing[0]] = Outcome(False, failure)
    return outcomes


def _command(client: Client, installed: Installed, server: Server, cases: Sequence[str]) -> Sequence[str]:
    arguments = [server.url, server.model, client.dialect, *cases]
    if client.driver.endswith(".mjs"):
        # Copy the driver, because Node looks for packages in the folder of the module.
        for source in (*(ROOT / "tests/clients/node").glob("*.mjs"), ROOT / "tests/clients/cases.json"):
            shutil.copy(source, installed.folder)
        return [installed.program("node"), str(installed.folder / client.driver), *arguments]
    if _is_agent(client):
        return [sys.executable, "-m", f"tests.clients.agents.{client.driver}", *arguments]
    return [installed.program("python"), "-m", f"tests.clients.drivers.{client.driver}", *arguments]


def _is_agent(client: Client) -> bool:
    """Whether the client is a command-line agent, whose driver runs in this Python, not in its own environment."""
    return (ROOT / "tests/clients/agents" / f"{client.driver}.py").exists()


def _environment(installed: Installed, folder: Path) -> Mapping[str, str]:
    """Return environment variables without the user's keys and settings, and with a temporary HOME."""
    home = folder.with_name("home")
    for needed in (folder, home):
        needed.mkdir(exist_ok=True)
    kept = {name: os.environ[name] for name in ("LANG", "TMPDIR", "SYSTEMROOT") if name in os.environ}
    path = os.pathsep.join([*map(str, installed.path), os.environ["PATH"]])
    return {**kept, **OFFLINE_ENVIRONMENT, "PATH": path, "HOME": str(home), "PYTHONPATH": str(ROOT), "TERM": "xterm"}


def _run(command: Sequence[str], environment: Mapping[str, str], folder: Path, seconds: float) -> tuple[str, str]:
    """Return the standard output, and a description of the failure that applies if the output lacks some cases."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=seconds)
        return output, f"ended with status {process.returncode}: {errors.strip()[-300:]}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return output, f"no answer within {seconds:.0f} s"


def _outcomes(output: str) -> Iterator[tuple[str, Outcome]]:
    for line in output.splitlines():
        if line.startswith('{"case"'):
            shown = json.loads(line)
            yield shown["case"], Outcome(shown["ok"], shown["detail"])
