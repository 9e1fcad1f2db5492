"""Measure how much later the chunks of a stream arrive because a server passes them on from another machine.

    python -m tests.bench.box_delay MODEL.gguf --chunks 500

A process with TLS plays the other machine, and sends the time in each chunk. A client reads the same stream
directly, and through `ingle serve` with that machine as a box.
"""

import argparse
import asyncio
import multiprocessing
import os
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import httpx

from app.client.pinned_tls import pinned_context
from app.process.listening import ListeningSockets
from app.settings.boxes import keep_box
from tests.app.server.shared_machine import RawBox, SharedMachine, environment, share
from tests.support.processes import until

SECONDS_BETWEEN = 0.02
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def send_times(shared: SharedMachine, chunks: int, ports: Connection) -> None:
    def answer(connection: ssl.SSLSocket, head: bytes) -> None:
        connection.sendall(HEAD)
        for _ in range(chunks):
            time.sleep(SECONDS_BETWEEN)
            event = b"data: %d\n\n" % time.monotonic_ns()
            connection.sendall(b"%x\r\n%s\r\n" % (len(event), event))
        connection.sendall(b"0\r\n\r\n")

    ports.send(RawBox(shared, answer).port)
    time.sleep(3600)


async def delays(url: str, tls: ssl.SSLContext | bool) -> Sequence[float]:
    """Return the milliseconds from the time in each chunk until its arrival."""
    body = {"model": "gpu/any", "prompt": "Hi", "stream": True}
    async with (
        httpx.AsyncClient(verify=tls, timeout=60) as client,
        client.stream("POST", f"{url}/v1/completions", json=body) as reply,
    ):
        reply.raise_for_status()
        lines = (line async for line in reply.aiter_lines() if line.startswith("data: "))
        return [(time.monotonic_ns() - int(line[6:])) / 1e6 async for line in lines]


@contextmanager
def served(model: str, folder: Path, port: int) -> Iterator[None]:
    command = [sys.executable, "-m", "app", "serve", "-q", "--model", model, "--port", str(port)]
    process = subprocess.Popen(command, env={**os.environ, **environment(folder)})
    try:
        until(lambda: is_ready(port))
        yield
    finally:
        process.terminate()
        process.wait()


def is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def report(name: str, measured: Sequence[float]) -> None:
    cuts = statistics.quantiles(measured, n=100)
    print(f"{name:20} p50 {cuts[49]:6.2f} ms   p95 {cuts[94]:6.2f} ms   p99 {cuts[98]:6.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--chunks", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shared = share(folder / "box")
        here, there = multiprocessing.Pipe()
        multiprocessing.get_context("fork").Process(
            target=send_times, args=(shared, given.chunks, there), daemon=True
        ).start()
        box = shared.box(here.recv())
        keep_box(box, folder / "laptop" / "state")
        free = ListeningSockets(0)
        free.close()
        direct: list[float] = []
        passed: list[float] = []
        with served(given.model, folder / "laptop", free.port):
            for _ in range(given.rounds):
                direct += asyncio.run(delays(box.url, pinned_context(box.fingerprint)))
                passed += asyncio.run(delays(f"http://127.0.0.1:{free.port}", True))
    report("direct", direct)
    report("through the server", passed)
    print(f"added: {statistics.median(passed) - statistics.median(direct):.2f} ms per chunk in the median")


if __name__ == "__main__":
    main()
