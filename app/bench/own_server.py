"""`ingle serve` as a competitor: a child process that is measured through its HTTP API."""

import asyncio
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from app.bench.child import child
from app.bench.competitor import OWN_NAME, own_build
from app.bench.completion_client import Endpoint, stream_all
from app.bench.sample import Sample, sample_of
from app.bench.workload import Load, Prompts
from app.process.instance import Instance, running_instances
from app.process.uninterruptible import run_uninterruptible
from app.settings.api_keys import own_key
from app.settings.settings import Settings, child_environment


class ServedCompetitor:
    """A running server that no other client uses."""

    def __init__(self, name: str, build: str, pid: int, endpoint: Endpoint) -> None:
        self.name = name
        self.build = build
        self.pid = pid
        self.endpoint = endpoint

    def warm_up(self, load: Load, prompts: Prompts) -> None:
        self.measure(load, prompts)

    def measure(self, load: Load, prompts: Prompts) -> Sample:
        timelines = run_uninterruptible(lambda: asyncio.run(stream_all(self.endpoint, prompts, load.output_tokens)))
        return sample_of(load, timelines)


_ROOT = Path(__file__).parents[2]  # folder that contains the package `app`, whether it is installed or not


@contextmanager
def own_server(model: Path, settings: Settings, threads: int) -> Iterator[ServedCompetitor]:
    """Start a server with the settings of this command, but without an on-disk cache."""
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
            raw = {"drafts": False}  # a draft would be right too often: the output for random tokens repeats itself
            endpoint = Endpoint(str(address.hostname), instance.port, instance.model, raw, own_key(own))
            yield ServedCompetitor(OWN_NAME, own_build(settings.kernels), process.pid, endpoint)
