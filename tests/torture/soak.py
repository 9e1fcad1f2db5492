"""A long run of random requests: `python -m tests.torture.soak MODEL [--embedding FOLDER] [--minutes 10] [--kills 30]`.

Clients send requests of every dialect to a running `ingle serve`: chats and texts, streamed and whole, with tools,
schemas, grammars, log-probabilities, long prompts, bad values, and embeddings; a third of the clients leave in the
middle. Printed: the statuses, and memory, threads, and descriptors of the server over time. With `--kills`, the server
is killed (SIGKILL) so many times in the middle of replies, and every response that it had reported as complete must be
there after the restart.
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
Request = tuple[str, str, Body | None]  # method, path, body


def words(draw: random.Random, most: int) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(1, most)))


def messages(draw: random.Random) -> list[dict[str, str]]:
    """Turns of a few users; some prompts are long, and some begin like others."""
    said = [{"role": "user", "content": words(draw, draw.choice((8, 40, 900)))}]
    for _ in range(draw.randrange(3)):
        said += [{"role": "assistant", "content": words(draw, 20)}, {"role": "user", "content": words(draw, 20)}]
    return said


FUNCTION: Body = {"name": "get_weather", "description": "Tells the weather", "parameters": SCHEMA}
TOOL: Body = {"type": "function", "function": FUNCTION}
SAMPLINGS: list[Body] = [{}, {"temperature": 0}, {"temperature": 1.3, "top_p": 0.9, "seed": 7}]
NAMED: Body = {"name": "weather", "schema": SCHEMA}
# By the kind of request, what a request of that kind may ask for besides.
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
    "look": [{}],
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


def look(draw: random.Random, limit: int) -> Request:
    paths = ("/v1/models", "/health", "/metrics", "/api/tags", "/api/ps", "/props", "/openapi.json", "/nowhere")
    return "GET", draw.choice(paths), None


def embedding(draw: random.Random, limit: int) -> Request:
    return "POST", "/v1/embeddings", {"input": [words(draw, 30) for _ in range(draw.randint(1, 8))]}


def bad(draw: random.Random, limit: int) -> Request:
    values: list[Any] = [-1, "x", [], {}, 10**30, None, "\ud800", True]
    name = draw.choice(("temperature", "max_tokens", "stop", "tools", "response_format", "messages", "seed", "model"))
    path = draw.choice(("/v1/chat/completions", "/v1/messages", "/api/chat", "/v1/responses"))
    return "POST", path, {name: draw.choice(values)}


# Of each kind, what makes a request, how often it comes, and whether its replies can be streamed.
Mix = Mapping[str, tuple[Callable[[random.Random, int], Request], int, bool]]

WRITING: Mix = {
    "chat": (chat, 4, True),
    "completion": (completion, 3, True),
    "response": (response, 3, True),
    "message": (message, 3, True),
    "ollama chat": (ollama_chat, 3, True),
    "ollama text": (ollama_text, 2, True),
    "llama.cpp": (llama_text, 2, True),
    "infill": (infill, 2, True),
    "tokens": (tokens, 3, False),
    "look": (look, 1, False),
    "bad": (bad, 1, False),
}
EMBEDDING: Mix = {
    "embedding": (embedding, 4, False),
    "look": (look, 1, False),
}


def request_of(mix: Mix, draw: random.Random) -> tuple[str, Request]:
    """The kind of a random request, and the request."""
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
        """Resident MB, threads, and descriptors, of the server alone."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        figures = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        descriptors = len(os.listdir(f"/proc/{self.process.pid}/fd"))
        return int(figures["VmRSS"].split()[0]) / 1000, int(figures["Threads"]), descriptors


@contextmanager
def serving(model: str, folder: Path) -> Iterator[Server]:
    """A server with state of its own below `folder`; ended by SIGTERM if it still runs."""
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


def exchange(port: int, request: Request, leaves_after: int | None) -> tuple[int, bytes]:
    """The status and the body of the answer; a client that leaves reads so many lines of it and closes."""
    method, path, body = request
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=REQUEST_SECONDS)
    try:
        content = None if body is None else json.dumps(body).encode()
        connection.request(method, path, content, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if leaves_after is None:
            return answer.status, answer.read()
        return answer.status, b"".join(itertools.islice(answer, leaves_after))
    finally:
        connection.close()


@dataclass
class Tally:
    """What the clients saw. Safe for several threads: each operation is one of CPython's."""

    statuses: collections.Counter[tuple[str, int]] = field(default_factory=collections.Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, kind: str, request: Request, status: int, body: bytes) -> None:
        self.statuses[kind, status] += 1
        if status >= 500 or b'"server_error"' in body or b'"api_error"' in body:
            self.failures.append(f"{status} {request[1]} {json.dumps(request[2])[:300]} -> {body[-300:]!r}")


def clients(server: Server, tally: Tally, seed: int, stops: threading.Event, mix: Mix) -> None:
    """Send one request after the other until told to stop."""
    draw = random.Random(seed)
    while not stops.is_set():
        kind, request = request_of(mix, draw)
        leaves = draw.randrange(12) if draw.random() < 0.33 else None
        try:
            tally.add(kind, request, *exchange(server.port, request, leaves))
        except (OSError, http.client.HTTPException) as problem:
            tally.failures.append(f"{type(problem).__name__} {request[1]} {json.dumps(request[2])[:300]}")


def soak(server: Server, minutes: float, streams: int, mix: Mix) -> bool:
    """Whether nothing failed and nothing grew."""
    tally, stops = Tally(), threading.Event()
    threads = [threading.Thread(target=clients, args=(server, tally, number, stops, mix)) for number in range(streams)]
    for thread in threads:
        thread.start()
    samples: list[tuple[float, int, int]] = []
    end = time.monotonic() + 60 * minutes
    while time.monotonic() < end and server.process.poll() is None:
        time.sleep(SAMPLE_SECONDS)
        samples.append(server.usage())
    stops.set()
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
    flat = True
    for name, column in zip(("resident MB", "threads", "descriptors"), zip(*samples, strict=True), strict=True):
        middle, last = (statistics.median(part) for part in (column[third : 2 * third] or column, column[-third:]))
        print(
            f"{name:12} first {column[0]:.0f}, middle third {middle:.0f}, last third {last:.0f}, most {max(column):.0f}"
        )
        flat = flat and last <= 1.1 * middle + 8
    print("flat" if flat else "GROWS")
    return flat and not tally.failures


def kill_again_and_again(model: str, folder: Path, kills: int) -> bool:
    """Kill the server in the middle of replies; every response that was reported complete is still there."""
    draw, missing = random.Random(1), 0
    kept: list[str] = []
    for number in range(kills):
        with serving(model, folder) as server:
            for response_id in kept[-20:]:
                status, _ = exchange(server.port, ("GET", f"/v1/responses/{response_id}", None), None)
                missing += status != 200
            tally, stops = Tally(), threading.Event()
            busy = [
                threading.Thread(target=clients, args=(server, tally, 100 * number + one, stops, WRITING))
                for one in range(3)
            ]
            for thread in busy:
                thread.start()
            end = time.monotonic() + draw.uniform(0.5, 3.0)
            while time.monotonic() < end:
                with suppress(OSError, http.client.HTTPException):
                    body = {"input": words(draw, 20), "max_output_tokens": 4}
                    status, answer = exchange(server.port, ("POST", "/v1/responses", body), None)
                    kept += [json.loads(answer)["id"]] if status == 200 else []
            server.process.kill()
            stops.set()
            server.process.wait(START_SECONDS)
            for thread in busy:
                thread.join(REQUEST_SECONDS)
    print(f"{kills} kills, {len(kept)} stored responses, {missing} missing")
    return not missing


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--embedding", help="a model that gives embeddings; it is served after the other one")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--streams", type=int, default=6)
    parser.add_argument("--kills", type=int, default=0)
    given = parser.parse_args()
    fine = True
    with tempfile.TemporaryDirectory(prefix="ingle-soak-") as name:
        folder = Path(name)
        if given.minutes:
            with serving(given.model, folder) as server:
                fine = soak(server, given.minutes, given.streams, WRITING)
        if given.embedding:
            with serving(given.embedding, folder) as server:
                fine = soak(server, given.minutes / 5, given.streams, EMBEDDING) and fine
        if given.kills:
            fine = kill_again_and_again(given.model, folder, given.kills) and fine
    sys.exit(not fine)


if __name__ == "__main__":
    main()
