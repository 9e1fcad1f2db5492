"""Send random requests to a server for a long time.

    python -m tests.torture.soak MODEL [--embedding FOLDER] [--minutes 10] [--kills 30]
    python -m tests.torture.soak MODEL --requests 20000 [--other MODEL --memory SIZE]

Clients send requests of every API to a running `ingle serve`: chats and completions, streamed and not, with tools,
schemas, grammars, log-probabilities, long prompts, bad values, and embeddings. A third of the requests disconnect
early. The report has the statuses, and the memory, threads, and descriptors of the server over time. The memory is the
resident memory without pages of files, since the system can drop those. KV caches, which grow until they are full, are
counted apart.

With `--requests`, each tenth sends the same requests, so that their speeds can be compared. A share of them (`--share`)
names the other model, and the memory should suffice for one of both. With `--kills`, the server is killed (SIGKILL)
that number of times during replies. After each restart, every response that the server had reported as complete must
still exist.
"""

import argparse
import collections
import http.client
import itertools
import json
import math
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from tests.torture.random_requests import (
    EMBEDDING,
    GENERATION,
    MODEL,
    OTHER_SHARE,
    Mix,
    Request,
    random_request,
    with_other_model,
    words,
)

START_SECONDS = 300.0
REQUEST_SECONDS = 300.0
SAMPLE_SECONDS = 5.0


@dataclass
class Server:
    """A running `ingle serve`."""

    process: "subprocess.Popen[bytes]"
    port: int

    def usage(self) -> "Usage":
        """Return what the server uses now. Raises OSError or HTTPException if it has exited."""
        _, body = exchange(self.port, ("GET", "/inglenook/models", None), None)
        models = json.loads(body)["models"]
        caches = sum(model["parked"] + model["memory"].get("host", {}).get("touched", 0) for model in models)
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        figures = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        descriptors = len(os.listdir(f"/proc/{self.process.pid}/fd"))
        resident = sum(int(figures[name].split()[0]) for name in ("RssAnon", "RssShmem"))
        return Usage(resident / 1000 - caches / 1e6, caches / 1e6, int(figures["Threads"]), descriptors)


class Usage(NamedTuple):
    """The memory and the handles that a server has at one time."""

    memory: float  # MB, without KV caches and pages of files
    caches: float  # MB of KV caches, of loaded and unloaded models
    threads: int
    descriptors: int


@contextmanager
def serving(model: str, folder: Path, *options: str) -> Iterator[Server]:
    """Run a server whose state is below `folder`. SIGTERM ends it if it still runs."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    environment = os.environ | {
        "INGLE_STATE_DIR": str(folder / "state"),
        "INGLE_KV_DISK_DIR": str(folder / "kv"),
        "INGLE_MODEL_ALIASES": f"{MODEL}=*",
    }
    command = [sys.executable, "-m", "app", "serve", "--model", model, "--port", str(port), "--quiet", *options]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        _wait_until_healthy(process, port)
        yield Server(process, port)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(START_SECONDS)


def _wait_until_healthy(process: "subprocess.Popen[bytes]", port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(OSError):
            if exchange(port, ("GET", "/health", None), None)[0] == 200:
                return
        time.sleep(0.2)
    raise SystemExit("the server did not start")


def exchange(port: int, request: Request, max_lines: int | None) -> tuple[int, bytes]:
    """Return the status and the body of the response. With `max_lines`, disconnect after this number of lines."""
    method, path, body = request
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=REQUEST_SECONDS)
    try:
        content = None if body is None else json.dumps(body).encode()
        connection.request(method, path, content, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if max_lines is None:
            return answer.status, answer.read()
        return answer.status, b"".join(itertools.islice(answer, max_lines))
    finally:
        connection.close()


@dataclass
class Tally:
    """The statuses and failures of all clients. Threads can share it, because each operation is atomic in CPython."""

    statuses: collections.Counter[tuple[str, int]] = field(default_factory=collections.Counter)
    failures: list[str] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)  # when each request ended

    def add(self, kind: str, request: Request, status: int, body: bytes) -> None:
        self.statuses[kind, status] += 1
        self.ends.append(time.monotonic())
        if status >= 500 or b'"server_error"' in body or b'"api_error"' in body:
            self.failures.append(f"{status} {request[1]} {json.dumps(request[2])[:300]} -> {body[-300:]!r}")


def send_requests(server: Server, tally: Tally, seeds: Iterator[int], stop: threading.Event, mix: Mix) -> None:
    """Send one random request for each seed, until `stop` is set. Several threads may share the seeds."""
    for seed in seeds:
        if stop.is_set():
            return
        draw = random.Random(seed)
        kind, request = random_request(mix, draw)
        max_lines = draw.randrange(12) if draw.random() < 0.33 else None
        try:
            tally.add(kind, request, *exchange(server.port, request, max_lines))
        except (OSError, http.client.HTTPException) as problem:
            tally.failures.append(f"{type(problem).__name__} {request[1]} {json.dumps(request[2])[:300]}")


@dataclass(frozen=True)
class Length:
    """When to stop: after a number of requests, or else after some minutes."""

    minutes: float
    requests: int = 0

    def seeds(self) -> Iterator[int]:
        """Return the seeds of all requests, the same ones in each tenth. Threads can share the iterator."""
        tenth = range(self.requests // 10)
        return itertools.chain.from_iterable(itertools.repeat(tenth, 10)) if tenth else itertools.count()


def soak(server: Server, length: Length, streams: int, mix: Mix) -> bool:
    """Send requests. Return True if no request failed and no resource of the server grew."""
    tally, stop, seeds = Tally(), threading.Event(), length.seeds()
    threads = [threading.Thread(target=send_requests, args=(server, tally, seeds, stop, mix)) for _ in range(streams)]
    for thread in threads:
        thread.start()
    samples: list[Usage] = []
    end = math.inf if length.requests else time.monotonic() + 60 * length.minutes
    began = time.monotonic()
    while time.monotonic() < end and any(thread.is_alive() for thread in threads) and server.process.poll() is None:
        time.sleep(SAMPLE_SECONDS)
        with suppress(OSError, http.client.HTTPException):  # it has exited
            samples.append(server.usage())
    stop.set()
    for thread in threads:
        thread.join(REQUEST_SECONDS)
    if length.requests:
        report_tenths([began, *tally.ends])
    return report(tally, samples) and server.process.poll() is None


def report_tenths(times: Sequence[float]) -> None:
    """Print the requests per second of each tenth of the run."""
    borders = [times[number * (len(times) - 1) // 10] for number in range(11)]
    rates = [(len(times) - 1) / 10 / (late - early) for early, late in pairwise(borders)]
    print("requests per second, by tenths:", " ".join(f"{rate:.1f}" for rate in rates))
    print(f"the last tenth has {rates[-1] / rates[0]:.1%} of the speed of the first")


def report(tally: Tally, samples: Sequence[Usage]) -> bool:
    for (kind, status), count in sorted(tally.statuses.items()):
        print(f"{kind:12} {status}  {count}")
    print(f"{sum(tally.statuses.values())} requests, {len(tally.failures)} failures")
    for failure in tally.failures[:20]:
        print("  ", failure)
    columns = {name: [getattr(sample, name) for sample in samples] for name in Usage._fields}
    for name in ("memory", "caches"):
        column = columns[name]
        tenths = [column[number * len(column) // 10 : (number + 1) * len(column) // 10] for number in range(10)]
        medians = [statistics.median(tenth) for tenth in tenths if tenth]
        print(f"{name} in MB, by tenths:", " ".join(f"{median:.0f}" for median in medians))
    growing = [name for name, column in columns.items() if _grows(name, column) and name != "caches"]
    print(f"GROWS: {', '.join(growing)}" if growing else "flat")
    return not growing and not tally.failures


def _grows(name: str, column: Sequence[float]) -> bool:
    """Print the middle and the last third of the run. Return whether the last one is clearly higher."""
    third = max(1, len(column) // 3)
    middle, last = (statistics.median(part) for part in (column[third : 2 * third] or column, column[-third:]))
    print(f"{name:12} first {column[0]:.0f}, middle third {middle:.0f}, last third {last:.0f}, max {max(column):.0f}")
    return last > 1.1 * middle + 8


def kill_repeatedly(model: str, folder: Path, kills: int) -> bool:
    """Kill the server during replies, and check that every response reported as complete still exists."""
    draw, missing = random.Random(1), 0
    response_ids: list[str] = []
    for number in range(kills):
        with serving(model, folder) as server:
            for response_id in response_ids[-20:]:
                status, _ = exchange(server.port, ("GET", f"/v1/responses/{response_id}", None), None)
                missing += status != 200
            tally, stop = Tally(), threading.Event()
            busy = [
                threading.Thread(
                    target=send_requests, args=(server, tally, itertools.count(1_000_000 * number), stop, GENERATION)
                )
                for _ in range(3)
            ]
            for thread in busy:
                thread.start()
            end = time.monotonic() + draw.uniform(0.5, 3.0)
            while time.monotonic() < end:
                with suppress(OSError, http.client.HTTPException):
                    body = {"input": words(draw, 20), "max_output_tokens": 4}
                    status, answer = exchange(server.port, ("POST", "/v1/responses", body), None)
                    response_ids += [json.loads(answer)["id"]] if status == 200 else []
            server.process.kill()
            stop.set()
            server.process.wait(START_SECONDS)
            for thread in busy:
                thread.join(REQUEST_SECONDS)
    print(f"{kills} kills, {len(response_ids)} stored responses, {missing} missing")
    return not missing


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--embedding", help="an embedding model to test after the first model")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--requests", type=int, default=0, help="send this number of requests, for as long as it takes")
    parser.add_argument("--other", help="a second model that some requests name")
    parser.add_argument("--share", type=float, default=OTHER_SHARE, help="share of the requests that name it, 0 to 1")
    parser.add_argument("--memory", default="auto", help="limit of the memory of all models")
    parser.add_argument("--streams", type=int, default=6)
    parser.add_argument("--kills", type=int, default=0)
    given = parser.parse_args()
    length = Length(given.minutes, given.requests)
    mix = with_other_model(Path(given.other).stem, given.share) if given.other else GENERATION
    options = ("--memory", given.memory, *(("--model", given.other) if given.other else ()))
    is_passed = True
    with tempfile.TemporaryDirectory(prefix="ingle-soak-") as name:
        folder = Path(name)
        if given.minutes:
            with serving(given.model, folder, *options) as server:
                is_passed = soak(server, length, given.streams, mix)
        if given.embedding:
            with serving(given.embedding, folder) as server:
                is_passed = soak(server, Length(given.minutes / 5), given.streams, EMBEDDING) and is_passed
        if given.kills:
            is_passed = kill_repeatedly(given.model, folder, given.kills) and is_passed
    sys.exit(not is_passed)


if __name__ == "__main__":
    main()
