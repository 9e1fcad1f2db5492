"""Run `ingle serve` on 127.0.0.1 with temporary folders, for SmolLM2 and for the scripted model."""

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from app.models.sources import pull
from app.process.instance import running_instances
from app.settings.settings import child_environment, load_settings
from tests.clients.agents.agent import AGENT_CONTEXT
from tests.clients.scripted_model import Call, write_scripted_model
from tests.clients.table import SCRIPTED, SMOLLM2
from tests.support.local_servers import answers

ALIASES = "gpt-*=*, claude-*=*, scripted=*"  # model names that some clients require
STARTING_SECONDS = 300


@dataclass(frozen=True)
class Server:
    """A running server."""

    url: str
    model: str  # name that requests use for the model
    log: Path


@dataclass(frozen=True)
class Servers:
    """Starts servers whose files are below one folder."""

    folder: Path
    calls: Sequence[Call]  # tool calls that the scripted model makes

    @contextmanager
    def running(self, name: str) -> Iterator[Server]:
        """Run the server `name` and yield it. Raises SystemExit if it does not start."""
        if name == SMOLLM2:
            with self._serving(name, []) as (url, log):
                yield Server(url, load_settings().model, log)
        else:
            path = self.folder / f"{SCRIPTED}.gguf"
            write_scripted_model(pull(load_settings().model, load_settings()).path, path, self.calls)
            with self._serving(name, ["--model", str(path), "--context", str(AGENT_CONTEXT)]) as (url, log):
                yield Server(url, SCRIPTED, log)

    @contextmanager
    def _serving(self, name: str, flags: Sequence[str]) -> Iterator[tuple[str, Path]]:
        """Run a server and yield its URL and its log file."""
        state, log = self.folder / f"{name}-state", self.folder / f"{name}.log"
        environment = child_environment(
            INGLE_STATE_DIR=str(state),
            INGLE_KV_DISK_DIR=str(self.folder / f"{name}-kv"),
            INGLE_MODEL_ALIASES=ALIASES,
        )
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "app", "serve", "--port", "0", *flags], env=environment, stderr=output
            )
        try:
            yield _url(process, state, log), log
        finally:
            process.terminate()
            process.wait()


def _url(process: "subprocess.Popen[bytes]", state: Path, log: Path) -> str:
    settings, deadline = replace(load_settings(), state_dir=state), time.monotonic() + STARTING_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        found = [it for it in running_instances(settings) if it.pid == process.pid]
        if found and answers(found[0].url):
            return found[0].url
        time.sleep(0.1)
    raise SystemExit(f"ingle serve did not start: {log.read_text(encoding='utf-8')}")
