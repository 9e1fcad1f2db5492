"""Send random requests to a server for a long time.

    python -m tests.torture.soak MODEL [--embedding FOLDER] [--minutes 10] [--kills 30]

Clients send requests of every API to a running `ingle serve`: chats and completions, streamed and not, with tools,
schemas, grammars, log-probabilities, long prompts, bad values, and embeddings. A third of the requests disconnect
early. The report has the statuses, and the memory, threads, and descriptors of the server over time. With `--kills`,
the server is killed (SIGKILL) that number of times during replies. After each restart, every response that the server
had reported as complete must still exist.
"""

import argparse
import collections
import http.client
import itertools
import json
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START_SECONDS = 300.0
REQUEST_SECONDS = 300.0
SAMPLE_SECONDS = 5.0
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["city", "days"],
}
WORDS = (
    "the",
    "river",
    "runs",
    "past",
    "seven",
    "old",
    "mills",
    "and",
    "lighthouse",
    "keepers",
    "write",
    "home",
    "of tin",
)
MODEL = "soak"  # an alias of the served model

Body = dict[str, Any]
Request = tuple[str, str, Body | None]  # (method, path, body)


def words(draw: random.Random, most: int) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(1, most)))


def messages(draw: random.Random) -> list[dict[str, str]]:
    """Return a conversation of random words. Some prompts are long, and some share a prefix."""
    turns = [{"role": "user", "content": words(draw, draw.choice((8, 40, 900)))}]
    for _ in range(draw.randrange(3)):
        turns += [{"role": "assistant", "content": words(draw, 20)}, {"role": "user", "content": words(draw, 20)}]
    return turns


FUNCTION: Body = {"name": "get_weather", "description": "Tells the weather", "parameters": SCHEMA}
TOOL: Body = {"type": "function", "function": FUNCTION}
SAMPLINGS: list[Body] = [{}, {"temperature": 0}, {"temperature": 1.3, "top_p": 0.9, "seed": 7}]
NAMED: Body = {"name": "weather", "schema": SCHEMA}
# Options that a request may have, by kind of request.
SHAPES: Mapping[str, list[Body]] = {
    "chat": [
        {},
        {"logprobs": True, "top_logprobs": 3},
        {"response_format": {"type": "json_schema", "json_schema": NAMED}},
        {"response_format": {"type": "json_object"}},
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": "required"},
        {"n": 2},
    ],
    "completion": [
        {},
        {"echo": True},
        {"logprobs": 2},
        {"guided_regex": "[a-z ]{1,40}"},
        {"best_of": 2, "stream": False},
    ],
    "response": [{}, {"store": False}, {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"}],
    "message": [
        {},
        {"system": "Be brief."},
        {"tools": [{"name": "get_weather", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}},
    ],
    "ollama chat": [{}, {"format": SCHEMA}, {"format": "json"}, {"tools": [TOOL]}],
    "llama.cpp": [{}, {"grammar": 'root ::= ("yes" | "no") " "?'}, {"n_probs": 2}, {"json_schema": SCHEMA}],
    "status": [{}],
}


def chat(draw: random.Random, limit: int) -> Request:
    return "POST", "/v1/chat/completions", {"messages": messages(draw), "max_tokens": limit, **draw.choice(SAMPLINGS)}


def completion(draw: random.Random, limit: int) -> Request:
    return "POST", "/v1/completions", {"prompt": words(draw, 60), "max_tokens": limit, **draw.choice(SAMPLINGS)}


def response(draw: random.Random, limit: int) -> Request:
    return "POST", "/v1/responses", {"input": messages(draw), "max_output_tokens": limit}


def message(draw: random.Random, limit: int) -> Request:
    return "POST", "/v1/messages", {"messages": messages(draw), "max_tokens": limit}


def ollama_chat(draw: random.Random, limit: int) -> Request:
    options = {"num_predict": limit, **draw.choice(SAMPLINGS)}
    return "POST", "/api/chat", {"model": MODEL, "messages": messages(draw), "options": options}


def ollama_text(draw: random.Random, limit: int) -> Request:
    return "POST", "/api/generate", {"model": MODEL, "prompt": words(draw, 40), "options": {"num_predict": limit}}


def llama_text(draw: random.Random, limit: int) -> Request:
    return "POST", "/completion", {"prompt": words(draw, 60), "n_predict": limit}


def infill(draw: random.Random, limit: int) -> Request:
    return "POST", "/infill", {"input_prefix": words(draw, 20), "input_suffix": "return x", "n_predict": limit}


def tokens(draw: random.Random, limit: int) -> Request:
    bodies: list[tuple[str, Body]] = [
        ("/tokenize", {"content": words(draw, 2000)}),
        ("/detokenize", {"tokens": draw.choices(range(40_000), k=limit)}),
        ("/apply-template", {"messages": messages(draw)}),
        ("/v1/messages/count_tokens", {"messages": messages(draw)}),
    ]
    return "POST", *draw.choice(bodies)


def status_page(draw: random.Random, limit: int) -> Request:
    paths = ("/v1/models", "/health", "/metrics", "/api/tags", "/api/ps", "/props", "/openapi.json", "/nowhere")
    return "GET", draw.choice(paths), None


def embedding(draw: random.Random, limit: int) -> Request:
    return "POST", "/v1/embeddings", {"input": [words(draw, 30) for _ in range(draw.randint(1, 8))]}


def bad(draw: random.Random, limit: int) -> Request:
    values: list[Any] = [-1, "x", [], {}, 10**30, None, "\ud800", True]
    name = draw.choice(("temperature", "max_tokens", "stop", "tools", "response_format", "messages", "seed", "model"))
    path = draw.choice(("/v1/chat/completions", "/v1/messages", "/api/chat", "/v1/responses"))
    return "POST", path, {name: draw.choice(values)}


# kind -> (function that makes a request, its relative frequency, whether its replies can be streamed)
Mix = Mapping[str, tuple[Callable[[random.Random, int], Request], int, bool]]

GENERATION: Mix = {
    "chat": (chat, 4, True),
    "completion": (completion, 3, True),
    "response": (response, 3, True),
    "message": (message, 3, True),
    "ollama chat": (ollama_chat, 3, True),
    "ollama text": (ollama_text, 2, True),
    "llama.cpp": (llama_text, 2, True),
    "infill": (infill, 2, True),
    "tokens": (tokens, 3, False),
    "status": (status_page, 1, False),
    "bad": (bad, 1, False),
}
EMBEDDING: Mix = {
    "embedding": (embedding, 4, False),
    "status": (status_page, 1, False),
}


def random_request(mix: Mix, draw: random.Random) -> tuple[str, Request]:
    """Return the kind of a random request, and the request."""
    [kind] = draw.choices(list(mix), [weight for _, weight, _ in mix.values()])
    make, _, streams = mix[kind]
    method, path, body = make(draw, draw.choice((1, 8, 32, 64)))
    if body is not None and streams:
        body |= {"stream": draw.random() < 0.6} | draw.choice(SHAPES.get(kind, [{}]))
    return kind, (method, path, body)


@dataclass
class Server:
    """A running `ingle serve`."""

    process: "subprocess.Popen[bytes]"
    port: int

    def usage(self) -> tuple[float, int, int]:
        """Return the server's resident memory in MB, its number of threads, and its number of descriptors."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        figures = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        descriptors = len(os.listdir(f"/proc/{self.process.pid}/fd"))
        return int(figures["VmRSS"].split()[0]) / 1000, int(figures["Threads"]), descriptors


@contextmanager
def serving(model: str, folder: Path) -> Iterator[Server]:
    """Run a server whose state is below `folder`. SIGTERM ends it if it still runs."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    environment = os.environ | {
        "INGLE_STATE_DIR": str(folder / "state"),
        "INGLE_KV_DISK_DIR": str(folder / "kv"),
        "INGLE_MODEL_ALIASES": f"{MODEL}=*",
    }
    command = [sys.executable, "-m", "app", "serve", "--model", model, "--port", str(port), "--quiet"]
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

    def add(self, kind: str, request: Request, status: int, body: bytes) -> None:
        self.statuses[kind, status] += 1
        if status >= 500 or b'"server_error"' in body or b'"api_error"' in body:
            self.failures.append(f"{status} {request[1]} {json.dumps(request[2])[:300]} -> {body[-300:]!r}")


def send_requests(server: Server, tally: Tally, seed: int, stop: threading.Event, mix: Mix) -> None:
    """Send one random request after the other until `stop` is set."""
    draw = random.Random(seed)
    while not stop.is_set():
        kind, request = random_request(mix, draw)
        max_lines = draw.randrange(12) if draw.random() < 0.33 else None
        try:
            tally.add(kind, request, *exchange(server.port, request, max_lines))
        except (OSError, http.client.HTTPException) as problem:
            tally.failures.append(f"{type(problem).__name__} {request[1]} {json.dumps(request[2])[:300]}")


def soak(server: Server, minutes: float, streams: int, mix: Mix) -> bool:
    """Send requests for `minutes`. Return True if no request failed and no resource of the server grew."""
    tally, stop = Tally(), threading.Event()
    threads = [
        threading.Thread(target=send_requests, args=(server, tally, number, stop, mix)) for number in range(streams)
    ]
    for thread in threads:
        thread.start()
    samples: list[tuple[float, int, int]] = []
    end = time.monotonic() + 60 * minutes
    while time.monotonic() < end and server.process.poll() is None:
        time.sleep(SAMPLE_SECONDS)
        samples.append(server.usage())
    stop.set()
    for thread in threads:
        thread.join(REQUEST_SECONDS)
    return report(tally, samples) and server.process.poll() is None


def report(tally: Tally, samples: list[tuple[float, int, int]]) -> bool:
    for (kind, status), count in sorted(tally.statuses.items()):
        print(f"{kind:12} {status}  {count}")
    print(f"{sum(tally.statuses.values())} requests, {len(tally.failures)} failures")
    for failure in tally.failures[:20]:
        print("  ", failure)
    third = max(1, len(samples) // 3)
    is_flat = True
    for name, column in zip(("resident MB", "threads", "descriptors"), zip(*samples, strict=True), strict=True):
        middle, last = (statistics.median(part) for part in (column[third : 2 * third] or column, column[-third:]))
        print(
            f"{name:12} first {column[0]:.0f}, middle third {middle:.0f}, last third {last:.0f}, max {max(column):.0f}"
        )
        is_flat = is_flat and last <= 1.1 * middle + 8
    print("flat" if is_flat else "GROWS")
    return is_flat and not tally.failures


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
                threading.Thread(target=send_requests, args=(server, tally, 100 * number + one, stop, GENERATION))
                for one in range(3)
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
    parser.add_argument("--streams", type=int, default=6)
    parser.add_argument("--kills", type=int, default=0)
    given = parser.parse_args()
    is_passed = True
    with tempfile.TemporaryDirectory(prefix="ingle-soak-") as name:
        folder = Path(name)
        if given.minutes:
            with serving(given.model, folder) as server:
                is_passed = soak(server, given.minutes, given.streams, GENERATION)
        if given.embedding:
            with serving(given.embedding, folder) as server:
                is_passed = soak(server, given.minutes / 5, given.streams, EMBEDDING) and is_passed
        if given.kills:
            is_passed = kill_repeatedly(given.model, folder, given.kills) and is_passed
    sys.exit(not is_passed)


if __name__ == "__main__":
    main()
