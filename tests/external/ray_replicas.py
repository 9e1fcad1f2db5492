"""Serve a model from replicas of Ray Serve: `PYTHON -m tests.external.ray_replicas MODEL.gguf`.

PYTHON must have Inglenook with its extra "ray". Four clients hold eight conversations of six turns, with Ray's
prefix-aware routing, and with routing by load for comparison. The replies must equal those of one server, and at least
95 % of the tokens of prompts must be cached from the second turn on. Then a replica is killed in the middle of a
stream: the stream must end with an error event, and the next turn must read at least 90 % of its prompt from files.
Finally the number of replicas changes from 1 to 2 and back while clients send requests, of which none may fail.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.support.local_servers import answers, free_port

KEY = "replicas-test"
HEADERS = {"Authorization": f"Bearer {KEY}"}
CONVERSATIONS, TURNS, CLIENTS = 8, 6, 4
ROUTINGS = ("load", "prefix")
MIN_CACHED, MIN_FROM_FILES = 0.95, 0.9
RULES = "Answer briefly, and name the river, the mill, and the lighthouse in this order. " * 96
START_SECONDS = 300.0


@dataclass
class Conversation:
    """A chat whose replies are drawn greedily. Those of another `round` share no prefix."""

    round: str
    number: int
    messages: list[dict[str, str]] = field(init=False)
    prompt_tokens: int = 0  # of all turns but the first
    cached_tokens: int = 0

    def __post_init__(self) -> None:
        self.messages = [{"role": "system", "content": f"You are {self.round} agent {self.number}. {RULES}"}]

    def ask(self, turn: int) -> dict[str, Any]:
        question = f"Question {turn} of agent {self.number}: what is upstream of mill {turn * 7 + self.number}?"
        self.messages.append({"role": "user", "content": question})
        return {"messages": self.messages, "max_tokens": 24, "temperature": 0}

    def take_turn(self, url: str, turn: int) -> None:
        reply = httpx.post(f"{url}/v1/chat/completions", json=self.ask(turn), **_OPTIONS)
        reply.raise_for_status()
        self.take(turn, reply.json()["choices"][0]["message"]["content"], reply.json()["usage"])

    def take(self, turn: int, text: str, usage: Mapping[str, Any]) -> None:
        self.messages.append({"role": "assistant", "content": text})
        if turn:
            self.prompt_tokens += usage["prompt_tokens"]
            self.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]


_OPTIONS: dict[str, Any] = {"headers": HEADERS, "trust_env": False, "timeout": 600}


def converse(url: str, name: str) -> list[Conversation]:
    """Hold all conversations of a round with four clients."""
    chats = [Conversation(name, number) for number in range(CONVERSATIONS)]

    def hold(some: Sequence[Conversation]) -> None:
        for turn in range(TURNS):
            for chat in some:
                chat.take_turn(url, turn)

    with ThreadPoolExecutor(CLIENTS) as clients:
        list(clients.map(hold, [chats[number::CLIENTS] for number in range(CLIENTS)]))
    return chats


def cached_share(chats: Sequence[Conversation]) -> float:
    return sum(chat.cached_tokens for chat in chats) / sum(chat.prompt_tokens for chat in chats)


@contextmanager
def one_server(model: Path, environment: Mapping[str, str]) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "app", "serve", "--quiet", "--model", str(model), "--port", str(port)]
    with subprocess.Popen([*command, "--threads", "1"], env=environment) as process:
        url = f"http://127.0.0.1:{port}"
        _wait(lambda: answers(url))
        yield url
        process.terminate()


class Cluster:
    """Ray on this machine, and the application on it."""

    def __init__(self, model: Path, environment: Mapping[str, str], folder: Path) -> None:
        self._model, self._environment, self._folder = model, environment, folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._run("ray", "start", "--head", "--num-cpus=4", f"--port={free_port()}", "--object-store-memory=80000000")

    def stop(self) -> None:
        self._run("ray", "stop", "--force")

    def deploy(self, replicas: int, routing: str = "prefix", *, scaled: int | None = None) -> None:
        """Run the application with new replicas. `scaled`: a number to which the same replicas are scaled."""
        described = {
            "http_options": {"host": "127.0.0.1", "port": self.port},
            "applications": [
                {
                    "name": "default",
                    "route_prefix": "/",
                    "import_path": "ray_serve:application",
                    "args": {"model": str(self._model), "replicas": replicas, "threads": 1, "routing": routing},
                    "deployments": [{"name": "Replica", "num_replicas": scaled or replicas}],
                }
            ],
        }
        file = self._folder / "serve.json"  # JSON is YAML
        file.write_text(json.dumps(described))
        self._run("serve", "deploy", str(file))
        _wait(lambda: self._is_running(scaled or replicas))

    def _is_running(self, replicas: int) -> bool:
        status = self._run("serve", "status")
        return "status: RUNNING" in status and f"RUNNING: {replicas}" in status and answers(self.url)

    def processes(self) -> list[psutil.Process]:
        """Return the processes of the replicas."""
        return [
            one
            for one in psutil.process_iter(["cmdline"])
            if "ray::ServeReplica:default:Replica" in " ".join(one.info["cmdline"] or ())
        ]

    def _run(self, *command: str) -> str:
        program = str(Path(sys.executable).with_name(command[0]))
        done = subprocess.run(
            [program, *command[1:]], env=self._environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{command}: {done.stdout}{done.stderr}")
        return done.stdout


def _wait(condition: Any) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError("the replicas did not become ready")
        time.sleep(0.5)


def kill_a_replica(cluster: Cluster, chat: Conversation) -> tuple[bool, float]:
    """Kill the replica that writes a reply.

    Returns whether its stream ended with an error event, and the cached share of the next turn.
    """
    busy = {one: sum(one.cpu_times()[:2]) for one in cluster.processes()}
    body = {**chat.ask(TURNS), "max_tokens": 400, "ignore_eos": True, "stream": True}
    events: list[str] = []
    with httpx.stream("POST", f"{cluster.url}/v1/chat/completions", json=body, **_OPTIONS) as stream:
        for line in stream.iter_lines():
            events.append(line)
            if len(events) == 60:
                max(busy, key=lambda one: sum(one.cpu_times()[:2]) - busy[one]).kill()
    ended = '"error"' in "".join(events[-4:])
    chat.messages.pop()
    before = chat.prompt_tokens, chat.cached_tokens
    chat.take_turn(cluster.url, TURNS)
    return ended, (chat.cached_tokens - before[1]) / (chat.prompt_tokens - before[0])


def scale(cluster: Cluster) -> tuple[int, int]:
    """Change the number of replicas while clients send requests. Returns the numbers of requests and of failures."""
    stopping, outcomes = threading.Event(), list[bool]()

    def send(number: int) -> None:
        turn = 0
        while not stopping.is_set():
            reply = httpx.post(
                f"{cluster.url}/v1/chat/completions", json=Conversation("scaling", number).ask(turn), **_OPTIONS
            )
            outcomes.append(reply.status_code == httpx.codes.OK)
            turn += 1

    with ThreadPoolExecutor(CLIENTS) as clients:
        sending = [clients.submit(send, number) for number in range(CLIENTS)]
        for replicas in (2, 1):
            cluster.deploy(1, scaled=replicas)
            time.sleep(5)
        stopping.set()
        for one in sending:
            one.result()
    return len(outcomes), outcomes.count(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    model = parser.parse_args().model.absolute()
    with tempfile.TemporaryDirectory() as home:
        root = Path(__file__).parents[2]
        environment = {
            **os.environ, "HOME": home, "INGLE_API_KEY": KEY, "INGLE_KV_DISK_DIR": f"{home}/kv",
            "PYTHONPATH": os.pathsep.join((str(root), str(root / "packaging"))),
            "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": home,
        }  # fmt: skip
        failures = 0
        for line, is_met in _checks(model, environment, Path(home)):
            print(f"{line}{'' if is_met else ' (FAILED)'}", flush=True)
            failures += not is_met
    sys.exit(bool(failures))


def _checks(model: Path, environment: Mapping[str, str], folder: Path) -> Iterator[tuple[str, bool]]:
    """Yield a line for each check, and whether its condition is met."""
    in_memory = {**environment, "INGLE_KV_DISK_GB": "0"}
    with one_server(model, in_memory) as url:
        alone = {routing: converse(url, routing) for routing in ROUTINGS}
    yield f"one server: {cached_share(alone['prefix']):.1%} of the prompt tokens cached", True
    with _running(Cluster(model, in_memory, folder)) as cluster:
        yield from _check_routing(cluster, alone)
    with _running(Cluster(model, environment, folder)) as cluster:
        yield from _check_changes(cluster)


@contextmanager
def _running(cluster: Cluster) -> Iterator[Cluster]:
    cluster.start()
    try:
        yield cluster
    finally:
        cluster.stop()


def _check_routing(cluster: Cluster, alone: Mapping[str, Sequence[Conversation]]) -> Iterator[tuple[str, bool]]:
    for routing in ROUTINGS:
        cluster.deploy(2, routing)
        chats = converse(cluster.url, routing)
        share = cached_share(chats)
        yield f"routing by {routing}: {share:.1%} cached", routing == "load" or share >= MIN_CACHED
        equal = sum(one.messages == other.messages for one, other in zip(alone[routing], chats, strict=True))
        yield f"{equal} of {CONVERSATIONS} conversations equal those of one server", equal == CONVERSATIONS


def _check_changes(cluster: Cluster) -> Iterator[tuple[str, bool]]:
    cluster.deploy(2)
    ended, share = kill_a_replica(cluster, converse(cluster.url, "kill")[0])
    yield f"stream of a killed replica ended with an error event: {ended}", ended
    yield f"next turn: {share:.1%} from files", share >= MIN_FROM_FILES
    cluster.deploy(1)
    requests, failures = scale(cluster)
    yield f"{failures} of {requests} requests failed while replicas were added and removed", not failures


if __name__ == "__main__":
    main()
