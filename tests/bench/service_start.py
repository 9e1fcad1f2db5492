"""Measure how long the first request to an idle service takes, beside a load of its model.

    python -m tests.bench.service_start MODEL.gguf --rounds 5

Each round starts a server twice. First `ingle serve`: from its start until it says that it is ready. Then a stand-in
for systemd listens, and starts the server for a request of one token: from the request to its whole reply.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.app.commands.test_serve import ready
from tests.support.processes import Started

SERVE = (sys.executable, "-m", "app", "serve")
SECONDS = 600.0  # time limit of a request


def load_seconds(model: Path, environment: dict[str, str]) -> float:
    began = time.monotonic()
    command = [*SERVE, "--model", str(model), "--port", "0"]
    with Started(command, env=environment, stderr=subprocess.PIPE, text=True) as server:
        try:
            ready(server, environment)
            return time.monotonic() - began
        finally:
            server.terminate()


@contextmanager
def idle_service(model: Path, environment: dict[str, str]) -> Iterator[str]:
    """Yield the URL of a service whose server does not run."""
    record = str(Path(environment["INGLE_STATE_DIR"], "record"))
    command = [sys.executable, "-m", "tests.app.socket_activator", record, *SERVE, "--quiet", "--model", str(model)]
    with Started(command, env=environment, stdout=subprocess.PIPE, text=True) as activator:
        assert activator.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(activator.stdout.readline())}"
        finally:
            activator.terminate()


def first_request_seconds(model: Path, environment: dict[str, str]) -> float:
    with idle_service(model, environment) as url:
        began = time.monotonic()
        body = {"model": model.stem, "prompt": "Hi", "max_tokens": 1}
        httpx.post(f"{url}/v1/completions", json=body, timeout=SECONDS, trust_env=False).raise_for_status()
        return time.monotonic() - began


def report(name: str, seconds: Sequence[float]) -> None:
    median = statistics.median(seconds)
    print(f"{name}: {median:.2f} s in the median ({min(seconds):.2f} to {max(seconds):.2f})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    model = given.model.absolute()
    with tempfile.TemporaryDirectory(prefix="ingle-service-") as folder:
        environment = {**os.environ, "INGLE_STATE_DIR": folder}
        load_seconds(model, environment)  # compiles the kernels
        loads, requests = list[float](), list[float]()
        for _ in range(given.rounds):
            loads.append(load_seconds(model, environment))
            requests.append(first_request_seconds(model, environment))
    report("ingle serve until it is ready", loads)
    report("first request to an idle service", requests)
    report("difference", [after - alone for after, alone in zip(requests, loads, strict=True)])


if __name__ == "__main__":
    main()
