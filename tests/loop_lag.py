"""How long others wait while a server is attacked: `python -m tests.loop_lag`, on a machine that does nothing else.

A server of this process has a model that takes a step in a given time, and one client reads a stream of it. Attackers
in processes of their own send one request after the other, without a pause: prompts of 10 MB, in the fewest and in the
most pieces; schemas that are hard to compile; bodies that are bad in many ways. Printed: how late the event loop was,
and the time between two tokens of the stream, quiet and under attack, in milliseconds; and what each attack was told.
"""

import argparse
import asyncio
import http.client
import json
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Mapping
from multiprocessing.queues import Queue
from pathlib import Path

from app.chat.template import ChatTemplateRenderer
from app.text.gguf_tokenizer import from_gguf
from app.text.tokenizer import Tokenizer
from engine.config import EngineConfig
from engine.core import Engine
from engine.request import StepPlan
from quant.gguf import GGUFFile
from tests.app.server.live_server import ControlledRunner, LiveServer
from tests.hash_model import HashTicket

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MEGABYTES_10 = 10 * 10**6
LOOK_SECONDS = 0.002  # between two looks at the loop's clock
CONTEXT = 8192

Attack = tuple[str, bytes]


def _chat(**fields: object) -> bytes:
    return json.dumps({"model": "hash", "max_tokens": 1, **fields}).encode()


def _asked(content: str = "Hi") -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def _schema(schema: object) -> bytes:
    named = {"name": "x", "schema": schema}
    return _chat(messages=_asked(), response_format={"type": "json_schema", "json_schema": named})


def _filled(begin: bytes, piece: bytes, end: bytes, size: int = MEGABYTES_10) -> bytes:
    return begin + piece * ((size - len(begin) - len(end)) // len(piece)) + end


def attacks() -> Mapping[str, Attack]:
    ids = b'{"model": "hash", "max_tokens": 1, "prompt": ['
    messages = b'{"model": "hash", "messages": ['
    properties = {f"p{number}": {"anyOf": [{"type": "string"}, {"type": "integer"}]} for number in range(2000)}
    nested: object = {"type": "string"}
    for _ in range(60):
        nested = {"type": "array", "items": nested, "minItems": 1, "maxItems": 3}
    return {
        "one message of 10 MB": (CHAT, _chat(messages=_asked("word " * (MEGABYTES_10 // 5 - 100)))),
        "one prompt of 3 MB": (COMPLETION, json.dumps({"model": "hash", "prompt": "x1 " * 10**6}).encode()),
        "10 MB of messages": (CHAT, _filled(messages, b'{"role":"user","content":""},', b'{"role":"user"}]}')),
        "10 MB of token ids": (COMPLETION, _filled(ids, b"1,", b"1]}")),
        "10 MB of lists": (COMPLETION, _filled(ids, b"[1],", b"[1]]}")),
        "10 MB of stops": (COMPLETION, _filled(b'{"model": "hash", "prompt": "a", "stop": [', b'"a",', b'"b"]}')),
        "10 MB of unknown fields": (CHAT, _filled(b'{"x": [', b"{},", b"{}]}")),
        "10 MB of a schema": (CHAT, _filled(b'{"model":"hash","messages":[],"guided_json":{"enum":[', b"1,", b"1]}}")),
        "10 MB of biases": (CHAT, _chat(messages=_asked(), logit_bias={str(key): 1 for key in range(700_000)})),
        "10 MB that is no JSON": (CHAT, _filled(b'{"model": "', b"\\u0061", b"")),
        "10 MB of brackets": (CHAT, b"[" * MEGABYTES_10),
        "a schema of 2,000 unions": (CHAT, _schema({"type": "object", "properties": properties})),
        "a schema of 60 levels": (CHAT, _schema(nested)),
        "a schema of 4,000 texts": (CHAT, _schema({"enum": [f"{number:0100}" for number in range(4000)]})),
        "a pattern": (CHAT, _schema({"type": "string", "pattern": "^(a?){500}(b|c|[^d]){500}$"})),
        "a bad field": (CHAT, _chat(messages=_asked(), temperature="hot")),
        "no JSON": (CHAT, b"{"),
        "another model": (CHAT, _chat(messages=_asked()).replace(b"hash", b"none")),
    }


def attack(port: int, names: list[str], told: "Queue[tuple[str, int]]") -> None:
    """Sends them in turn until the process is ended."""
    bodies = attacks()
    while True:
        for name in names:
            path, body = bodies[name]
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            told.put((name, connection.getresponse().status))
            connection.close()


def read_stream(port: int, seconds: float, gaps: "Queue[list[float]]") -> None:
    """Reads replies for so long; then tells the seconds between their tokens."""
    found: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        body = {"model": "hash", "prompt": "Hi", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        connection.request("POST", COMPLETION, json.dumps(body), {"Content-Type": "application/json"})
        last, response = 0.0, connection.getresponse()
        while (line := response.readline()) and time.perf_counter() < end:
            if line.startswith(b"data: {"):
                now = time.perf_counter()
                found += [now - last] if last else []
                last = now
        connection.close()
    gaps.put(found)


class PacedRunner(ControlledRunner):
    """The hash model; each step takes so many seconds, in which the interpreter is free."""

    def __init__(self, config: EngineConfig, seconds: float) -> None:
        super().__init__(config)
        self._seconds = seconds

    def launch(self, plan: StepPlan) -> HashTicket:
        time.sleep(self._seconds)
        return super().launch(plan)


def paced_engine(tokenizer: Tokenizer, seconds: float) -> Engine[HashTicket]:
    config = EngineConfig("hash", CONTEXT, 1 + 8 * CONTEXT // 16, max_step_tokens=256, max_running=32)
    return Engine(config, tokenizer.vocab_size, PacedRunner(config, seconds))


async def watch(seconds: float) -> list[float]:
    """How many seconds late the loop was, at each look."""
    late, end = [], time.perf_counter() + seconds
    while (before := time.perf_counter()) < end:
        await asyncio.sleep(LOOK_SECONDS)
        late.append(time.perf_counter() - before - LOOK_SECONDS)
    return late


def figures(values: list[float]) -> str:
    ordered = sorted(values)
    at = [ordered[min(len(ordered) - 1, round(share * len(ordered)))] * 1000 for share in (0.5, 0.99, 0.999, 1)]
    return "p50 {:6.1f}   p99 {:6.1f}   p99.9 {:6.1f}   worst {:6.1f}".format(*at) + f"   of {len(ordered)}"


def measured(server: LiveServer, seconds: float) -> tuple[list[float], list[float]]:
    """How late the loop was, and the times between tokens."""
    gaps: Queue[list[float]] = multiprocessing.get_context("spawn").Queue()
    reader = multiprocessing.get_context("spawn").Process(target=read_stream, args=(server.port, seconds, gaps))
    reader.start()
    late = server.call(watch(seconds))
    found = gaps.get()
    reader.join()
    return late, found


def attacked(server: LiveServer, names: list[str], number: int, measure: Callable[[], object]) -> Counter[str]:
    """`measure` while so many attackers are at it; what they were told."""
    context = multiprocessing.get_context("spawn")
    told: Queue[tuple[str, int]] = context.Queue()
    turns = [names[start::number] + names[: start or 0] for start in range(number)]
    processes = [context.Process(target=attack, args=(server.port, turn, told), daemon=True) for turn in turns]
    for process in processes:
        process.start()
    told.get()
    measure()
    for process in processes:
        process.kill()
        process.join()
    answers: Counter[str] = Counter()
    while not told.empty():
        name, status = told.get()
        answers[f"{name}: {status}"] += 1
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, help="a GGUF file, whose vocabulary and template are used")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--step", type=float, default=0.01, help="seconds that a step takes")
    parser.add_argument("--attackers", type=int, default=2)
    parser.add_argument("--each", action="store_true", help="each attack alone, for as long")
    given = parser.parse_args()
    with GGUFFile(given.model) as file:
        tokenizer = from_gguf(file.metadata)
    names = list(attacks())
    with (
        ChatTemplateRenderer() as renderer,
        LiveServer("hash", paced_engine(tokenizer, given.step), tokenizer, renderer) as server,
    ):
        server.service.grammars.prepare()
        rounds = {name: [name] for name in names} if given.each else {"all": names}
        for what, chosen in {"quiet": list[str](), **rounds}.items():

            def measure(what: str = what) -> None:
                late, gaps = measured(server, given.seconds)
                print(f"{what:28}  loop late {figures(late)}\n{'':28}  tokens    {figures(gaps)}", flush=True)

            if chosen:
                for answer, count in attacked(server, chosen, given.attackers, measure).items():
                    print(f"{'':28}  {count:5} x {answer}")
            else:
                measure()


if __name__ == "__main__":
    main()
