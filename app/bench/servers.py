"""The servers that are measured over HTTP: ours and llama.cpp's, each a child on a port of its own, found by nobody."""

import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from app.bench.child import child
from app.bench.completion_client import Endpoint
from app.bench.llama_build import LlamaBuild
from app.bench.llama_tools import NATIVE_NAME, slot_tokens
from app.bench.own_build import OWN_NAME, own_build
from app.bench.served import ServedContender
from app.bench.workload import Load
from app.process.instance import Instance, running_instances
from app.settings.api_keys import own_key
from app.settings.settings import Settings, child_environment

_ROOT = Path(__file__).parents[2]  # the folder that `app` is in, whether installed or not

# Of llama-server, where it knows them: what costs time and is never used here.
_SPARED = {"--no-webui": (), "--no-slots": (), "--cache-ram": ("0",)}


@contextmanager
def ingle_server(model: Path, settings: Settings, threads: int) -> Iterator[ServedContender]:
    """`ingle serve` with the settings of this command, but nothing kept on disk. Its record lies where no other command
    looks for it."""
    command = [sys.executable, "-m", "app", "serve", "--quiet", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", "0"]
    command += ["--threads", str(threads), "--kernels", settings.kernels, "--device", settings.device]
    command += ["--deterministic"] * settings.deterministic
    if settings.context:
        command += ["--context", str(settings.context)]
    with tempfile.TemporaryDirectory(prefix="ingle-bench-") as folder:
        environment = child_environment(INGLE_STATE_DIR=folder, INGLE_KV_DISK_GB="0", INGLE_MAX_REQUESTS="0")
        with child("ingle serve", command, cwd=_ROOT, environment=environment) as process:
            own = replace(settings, state_dir=Path(folder))
            instance: Instance = process.wait_for(lambda: next(iter(running_instances(own)), None))
            address = urlsplit(instance.url)
            endpoint = Endpoint(str(address.hostname), instance.port, instance.model, key=own_key(own))
            yield ServedContender(OWN_NAME, own_build(settings.kernels), process.pid, endpoint)


@contextmanager
def llama_server(build: LlamaBuild, model: Path, threads: int, loads: Sequence[Load]) -> Iterator[ServedContender]:
    """llama-server with as many slots as the loads need, each as long as the longest of them."""
    streams, slot = max(load.streams for load in loads), max(slot_tokens(load.context + 1) for load in loads)
    port = free_port()
    command = [str(build.server), "-m", str(model), "--host", "127.0.0.1", "--port", str(port)]
    command += ["-t", str(threads), "-tb", str(threads), "-np", str(streams), "-c", str(streams * slot)]
    for option, values in _SPARED.items():
        command += [option, *values] if option in build.server_options else []
    with child("llama-server", command) as process:
        process.wait_for(lambda: answers(f"http://127.0.0.1:{port}"))
        endpoint = Endpoint("127.0.0.1", port, str(model), {"cache_prompt": False})
        yield ServedContender(NATIVE_NAME, build.description, process.pid, endpoint)


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


def answers(url: str) -> bool:
    """Whether a server has loaded its model."""
    try:
        return httpx.get(f"{url}/health", trust_env=False).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False
