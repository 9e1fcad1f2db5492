"""Serve several models whose memory does not suffice for all of them, and check replies, caches, and waiting times.

    python -m tests.torture.many_models replies MODEL MODEL ... [--embedding FOLDER] [--requests 600]
    python -m tests.torture.many_models caches MODEL MODEL [--turns 8]
    python -m tests.torture.many_models stream MODEL LARGE_MODEL [--rounds 10]
    python -m tests.torture.many_models agents MODEL MODEL [--seconds 120]
    python -m tests.torture.many_models background MODEL MODEL [--rounds 10]
    python -m tests.torture.many_models cycles MODEL ... [--rounds 100]
    python -m tests.torture.many_models ledger MODEL MODEL ... [--embedding FOLDER] [--requests 300]

`replies`: eight clients send requests to random models, of which any two fit. Each reply must equal that of a server
with this model alone. `caches`: a conversation whose model is unloaded between turns computes only new tokens.
`stream`: seconds between tokens of one model while another one loads. `agents`: two clients alternate between two
models of which one fits. `background`: a long background reply of one model must be the same if requests for the other
one, which does not fit beside it, arrive meanwhile; these do not wait for its end. `cycles`: the memory, threads, and
descriptors of a server after loads and unloads of each model in turn. `ledger`: the bytes that the ledger counts, next
to the memory of the process, after random loads, unloads, and requests.
"""

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from tests.support.local_servers import answers, free_port

CLIENTS = 8
PROMPTS = 12  # different requests per model
CONTEXT = "2048"
WORDS = tuple("the river runs past seven old mills and lighthouse keepers write home of tin boats".split(" "))  # noqa: SIM905
MARGIN = 1.02  # memory above the promises of two models
COUNTED = ("weights", "steps", "touched", "tokenizer")  # what the ledger counts as taken from the system
ROOM = 200e6  # bytes for the parked cache of a model beside another model


@dataclass(frozen=True)
class Server:
    url: str
    process: "subprocess.Popen[bytes]"

    def post(self, path: str, body: dict[str, Any], **headers: str) -> Any:
        reply = httpx.post(f"{self.url}{path}", json=body, headers=headers, trust_env=False, timeout=600)
        if reply.status_code != httpx.codes.OK:
            raise RuntimeError(f"{path}: {reply.status_code} {reply.text}")
        return reply.json()

    def unload(self, model: str) -> None:
        self.post("/api/v1/models/unload", {"instance_id": model})

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of a metric that have these labels."""
        text = httpx.get(f"{self.url}/metrics", trust_env=False).text
        found = re.findall(rf"^ingle:{name}\{{(.*?)\}} (\S+)$", text, re.MULTILINE)
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(float(value) for sample, value in found if all(one in sample for one in wanted))


@contextmanager
def served(home: Path, models: Sequence[Path], *options: str) -> Iterator[Server]:
    """Run a server in a scratch home. Compiled kernels stay in the usual cache."""
    port = free_port()
    named = [part for model in models for part in ("--model", str(model))]
    command = [sys.executable, "-m", "app", "serve", *named, "--port", str(port), "--context", CONTEXT, *options]
    environment = {**os.environ, "HOME": str(home), "INGLE_KV_DISK_DIR": str(home / "kv")}
    process = subprocess.Popen(command, env=environment, stderr=(home / "log").open("ab"))
    server = Server(f"http://127.0.0.1:{port}", process)
    try:
        while not answers(server.url):
            if process.poll() is not None:
                raise RuntimeError((home / "log").read_text())
            time.sleep(0.1)
        yield server
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def name_of(model: Path) -> str:
    return model.name if model.is_dir() else model.stem


def request(model: Path, number: int, *, embeds: bool) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a request that always has the same reply."""
    draw = random.Random(number)
    text = " ".join(draw.choices(WORDS, k=draw.randint(5, 60)))
    if embeds:
        return "/v1/embeddings", {"model": name_of(model), "input": text}
    sampling = {"temperature": 0} if number % 2 else {"temperature": 0.9, "seed": number}
    return "/v1/completions", {"model": name_of(model), "prompt": text, "max_tokens": 16, **sampling}


def content(reply: Any) -> Any:
    return [one.get("text", one.get("embedding")) for one in reply.get("choices", reply.get("data"))]


def replies(models: Sequence[Path], embedding: Path | None, requests: int) -> None:
    every = [*models, *([embedding] if embedding else [])]
    expected: dict[tuple[str, int], Any] = {}
    sizes = []
    for model in every:
        with tempfile.TemporaryDirectory() as home, served(Path(home), [model]) as server:
            for number in range(PROMPTS):
                path, body = request(model, number, embeds=model == embedding)
                expected[name_of(model), number] = content(server.post(path, body))
            sizes.append(promised(server))
    limit = MARGIN * sum(sorted(sizes)[-2:])
    draw, outcomes = random.Random(7), Counter[str]()
    jobs = [(draw.choice(every), draw.randrange(PROMPTS)) for _ in range(requests)]

    def ask(job: tuple[Path, int]) -> None:
        model, number = job
        path, body = request(model, number, embeds=model == embedding)
        try:
            equal = content(server.post(path, body)) == expected[name_of(model), number]
            outcomes["equal" if equal else "different"] += 1
        except RuntimeError as error:
            outcomes[str(error)[:200]] += 1

    with tempfile.TemporaryDirectory() as home, served(Path(home), every, "--memory", f"{limit / 1e9:.3f}GB") as server:
        started = time.monotonic()
        with ThreadPoolExecutor(CLIENTS) as clients:
            list(clients.map(ask, jobs))
        seconds = time.monotonic() - started
        unloads = server.metric("unloads_total", reason="memory")
    print(f"{requests} requests to {len(every)} models in {seconds:.0f} s: {dict(outcomes)}, {unloads:.0f} unloads")


def caches(models: Sequence[Path], turns: int, *, stored: bool) -> None:
    """Hold a conversation from about 900 tokens. After each turn, the model makes room for the other one."""
    model, other = models
    limit = max(map(alone_bytes, models)) + ROOM
    options = ("--memory", f"{limit / 1e9:.3f}GB")
    with tempfile.TemporaryDirectory() as home, served(Path(home), models, *options) as server:
        messages = [{"role": "user", "content": " ".join(random.Random(1).choices(WORDS, k=900))}]
        for turn in range(turns):
            body = {"model": name_of(model), "messages": messages, "max_tokens": 40, "store": stored}
            reply = server.post("/v1/chat/completions", body)
            usage = reply["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            print(f"turn {turn}: {usage['prompt_tokens']} prompt tokens, {cached} cached")
            text = reply["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]
            use(server, name_of(other))
        print(f"{server.metric('unloads_total', reason='memory'):.0f} unloads")


def alone_bytes(model: Path) -> float:
    """Return the bytes that a model may use on a server without others."""
    with tempfile.TemporaryDirectory() as home, served(Path(home), [model]) as server:
        return promised(server)


def promised(server: Server) -> float:
    return sum(server.metric("memory_bytes", what=what) for what in ("weights", "steps", "cache", "tokenizer"))


def stream(models: Sequence[Path], rounds: int) -> None:
    """Compare the seconds between tokens of the first model with and without a load of the second one."""
    first, second = map(name_of, models)
    with tempfile.TemporaryDirectory() as home, served(Path(home), models) as server:
        use(server, second)
        for _ in range(rounds):
            server.unload(second)
            began = time.monotonic()
            use(server, second)
            alone = time.monotonic() - began
            quiet = gaps(server, first, lambda: None)[0]
            server.unload(second)
            during, seconds = gaps(server, first, partial(use, server, second))
            print(
                f"p99 between tokens {percentile(quiet):.1f} ms quiet, {percentile(during):.1f} ms (longest "
                f"{max(during):.1f}) during a load of {seconds:.2f} s, {alone:.2f} s alone"
            )


def use(server: Server, model: str) -> None:
    server.post("/v1/completions", {"model": model, "prompt": "a", "max_tokens": 1})


def gaps(server: Server, model: str, work: Callable[[], object]) -> tuple[list[float], float]:
    """Stream a reply while `work` runs on a thread. Return the milliseconds between tokens then, and its seconds."""
    body = {"model": model, "prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    times: list[float] = []
    ran: list[float] = []

    def timed() -> None:
        began = time.monotonic()
        work()
        ran.extend((began, time.monotonic()))

    worker = threading.Thread(target=timed)
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, trust_env=False, timeout=600) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                times.append(time.monotonic())
            if len(times) == 50:
                worker.start()
                times.append(times[-1])
            if len(times) > 300 and not worker.is_alive():
                break
    worker.join()
    began, ended = ran
    ended = max(ended, began + 2.0)  # without work, the tokens of two seconds
    within = [time for time in times if began <= time <= ended]
    return [1000 * (late - early) for early, late in pairwise(within)], ran[1] - ran[0]


def percentile(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


def agents(models: Sequence[Path], seconds: float) -> None:
    """Two agents send short turns without pause, each to one of two models of which one fits."""
    alone = {}
    sizes = []
    for model in models:
        with tempfile.TemporaryDirectory() as home, served(Path(home), [model]) as server:
            alone[model] = turns(server, model, seconds / 4)[0] / (seconds / 4)
            sizes.append(promised(server))
    limit = max(sizes) + 0.7 * min(sizes)  # too little for both; a load takes more for a moment
    with (
        tempfile.TemporaryDirectory() as home,
        served(Path(home), models, "--memory", f"{limit / 1e9:.3f}GB") as server,
    ):
        with ThreadPoolExecutor(2) as clients:
            done = list(clients.map(lambda model: turns(server, model, seconds), models))
        switches = server.metric("unloads_total", reason="memory")
    work = sum(count / seconds / alone[model] for model, (count, _) in zip(models, done, strict=True))
    longest = max(longest for _, longest in done)
    print(
        f"{switches:.0f} switches in {seconds:.0f} s; work {work:.0%} of one model alone; longest turn {longest:.1f} s"
    )


def turns(server: Server, model: Path, seconds: float) -> tuple[int, float]:
    """Return the number of turns of an agent in this time, and the seconds of the longest one."""
    count, longest, end = 0, 0.0, time.monotonic() + seconds
    messages: list[dict[str, str]] = []
    while time.monotonic() < end:
        if not messages or len(json.dumps(messages)) > 4000:
            messages = [{"role": "user", "content": f"{name_of(model)} {' '.join(WORDS)}"}]
        began = time.monotonic()
        body = {"model": name_of(model), "messages": messages, "max_tokens": 24, "ignore_eos": True}
        reply = server.post("/v1/chat/completions", body)
        longest = max(longest, time.monotonic() - began)
        text = reply["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]
        count += 1
    return count, longest


def background(models: Sequence[Path], rounds: int) -> None:
    """Send requests to the second model during a background reply of the first one."""
    first, second = models
    limit = max(map(alone_bytes, models)) + ROOM
    options = ("--memory", f"{limit / 1e9:.3f}GB", "--kv-disk-gb", "0")
    prompt = " ".join(random.Random(1).choices(WORDS, k=100))
    body = {
        "model": name_of(first), "prompt": prompt, "max_tokens": 1500, "ignore_eos": True, "seed": 1,
        "temperature": 0.9, "frequency_penalty": 0.2, "drafts": False, "service_class": "background",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as home, served(Path(home), models, *options) as server:
        expected = content(server.post("/v1/completions", body))
        with ThreadPoolExecutor(1) as client:
            late = client.submit(server.post, "/v1/completions", body)
            waits: list[float] = []
            while not late.done() and len(waits) < rounds:
                time.sleep(2)
                began = time.monotonic()
                use(server, name_of(second))
                waits.append(time.monotonic() - began)
            done_last = late.done()
            is_equal = content(late.result()) == expected
        unloads = server.metric("unloads_total", reason="memory", model_name=name_of(first))
    print(f"{'equal' if is_equal else 'DIFFERENT'}; suspended at most {unloads:.0f} times; {len(waits)} other requests")
    print(f"they took {min(waits):.2f} to {max(waits):.2f} s{', the last one after its end' if done_last else ''}")


def cycles(models: Sequence[Path], rounds: int) -> None:
    with tempfile.TemporaryDirectory() as home, served(Path(home), models) as server:
        for number in range(1, rounds + 1):
            for model in models:
                use(server, name_of(model))
                server.unload(name_of(model))
            if number % 10 == 0:
                descriptors = len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))
                counts = f"{thread_count(server)} threads, {descriptors} descriptors"
                print(f"after {number} loads: {resident_bytes(server) / 1e6:.0f} MB, {counts}", flush=True)


def ledger(models: Sequence[Path], embedding: Path | None, steps: int) -> None:
    every, draw = [*models, *([embedding] if embedding else [])], random.Random(3)
    worst, worst_step, differences = 0.0, "", []
    with tempfile.TemporaryDirectory() as home, served(Path(home), every) as server:
        for model in every:  # compiles kernels, and loads libraries
            path, body = request(model, 1, embeds=model == embedding)
            server.post(path, body)
        for model in every:
            server.unload(name_of(model))
        start, threads = resident_bytes(server), thread_count(server)
        for step in range(steps):
            model = draw.choice(every)
            unloads = draw.random() < 0.4
            if unloads:
                server.unload(name_of(model))
            else:
                path, body = request(model, draw.randrange(PROMPTS), embeds=model == embedding)
                server.post(path, body)
            counted = sum(server.metric("memory_bytes", what=what) for what in COUNTED)
            difference = resident_bytes(server) - start - counted
            differences.append(difference)
            if (share := abs(difference) / max(0.03 * counted, 64e6)) > worst:
                worst, worst_step = share, f"step {step}, {'unload' if unloads else 'request'} of {name_of(model)}"
            if step % 50 == 0:
                print(f"step {step}: counted {counted / 1e6:.0f} MB, {difference / 1e6:+.0f} MB in the process")
        for model in every:
            server.unload(name_of(model))
        left, more = resident_bytes(server) - start, thread_count(server) - threads
        print(f"{steps} steps: differences {min(differences) / 1e6:+.0f} to {max(differences) / 1e6:+.0f} MB")
        print(f"at most {worst:.2f} of the allowance, after {worst_step}")
        print(f"{left / 1e6:+.0f} MB and {more:+} threads after all unloads")


def resident_bytes(server: Server) -> int:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return 1024 * int(re.findall(r"RssAnon:\s+(\d+)", status)[0])


def thread_count(server: Server) -> int:
    return len(list(Path(f"/proc/{server.process.pid}/task").iterdir()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attack", choices=["replies", "caches", "stream", "agents", "background", "cycles", "ledger"])
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--embedding", type=Path)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--not-stored", action="store_true", help="caches: requests that must not be written to files")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=120)
    given = parser.parse_args()
    match given.attack:
        case "replies":
            replies(given.models, given.embedding, given.requests)
        case "caches":
            caches(given.models, given.turns, stored=not given.not_stored)
        case "stream":
            stream(given.models, given.rounds)
        case "background":
            background(given.models, given.rounds)
        case "cycles":
            cycles(given.models, given.rounds)
        case "ledger":
            ledger(given.models, given.embedding, given.requests)
        case "agents":
            agents(given.models, given.seconds)


if __name__ == "__main__":
    main()
