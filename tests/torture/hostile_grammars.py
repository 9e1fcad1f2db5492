"""Check that grammars cannot harm other clients: `python -m tests.torture.hostile_grammars MODEL.gguf`.

The program sends 200 requests with very expensive grammars and schemas to a server, several in parallel, in each field
that accepts one, streamed and not. Meanwhile one client reads the same stream repeatedly. The report has the statuses
and the slowest responses; the longest time between two tokens of the stream, with and without the attack, and whether
its text was the same; and the memory of all server processes before the attack, at its peak, and after it. The exit
status is 1 if a limit in RELIABILITY.md is exceeded.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.app.grammars.hostile_grammars import Hostile, hostile

CHAT, COMPLETION, LLAMA = "/v1/chat/completions", "/v1/completions", "/completion"
STREAM = {"prompt": "Once upon a time", "max_tokens": 100, "temperature": 0, "ignore_eos": True, "stream": True}
REPLY_TOKENS = 24
QUIET_ROUNDS = 3
SETTLING_SECONDS = 75.0  # wait longer than a minute, after which unused grammar processes exit
MAX_MEMORY_RATIO = 1.25  # limit of the memory after the attack, relative to the memory before it
MAX_SECONDS, MAX_GAP = 5.0, 1.0


@contextmanager
def serving(model: Path) -> Iterator[tuple[str, int]]:
    """Run a server with temporary folders, and yield its URL and its process id."""
    with tempfile.TemporaryDirectory() as home:
        folders = {"INGLE_STATE_DIR": f"{home}/state", "INGLE_KV_DISK_DIR": f"{home}/kv", "XDG_CONFIG_HOME": home}
        command = [sys.executable, "-m", "app", "serve", "--model", str(model), "--port", "0", "--context", "2048"]
        log_path = Path(home, "log")
        with log_path.open("wb") as log, subprocess.Popen(command, env=os.environ | folders, stderr=log) as process:
            try:
                while not (found := re.search(r"is ready at (http://127\.0\.0\.1:\d+)/v1", log_path.read_text())):
                    assert process.poll() is None, log_path.read_text()
                    time.sleep(0.1)
                yield found[1], process.pid
            finally:
                process.terminate()


def memory(pid: int) -> float:
    """Return the memory in MB that a process and its descendants have allocated. Each shared page counts once.

    Mapped files are not counted, because other programs may share them.
    """
    pids, left = [pid], [pid]
    while left:
        found = _children(left.pop())
        pids += found
        left += found
    return sum(map(_allocated_kilobytes, pids)) / 1024


def _children(pid: int) -> list[int]:
    """Return the ids of the processes that any thread of a process has started. The list is empty if the process has
    exited.
    """
    found: list[int] = []
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, thread.read_text().split())
    return found


def _allocated_kilobytes(pid: int) -> int:
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    found = re.search(r"^Pss_Anon:\s+(\d+)", rollup, re.MULTILINE)
    return int(found[1]) if found else 0


@dataclass
class Control:
    """A client that reads the same stream repeatedly."""

    gaps: list[float] = field(default_factory=list)
    texts: set[str] = field(default_factory=set)

    async def read(self, client: httpx.AsyncClient) -> None:
        text, last = "", 0.0
        async with client.stream("POST", COMPLETION, json=STREAM) as reply:
            async for line in reply.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                now = time.perf_counter()
                self.gaps += [now - last] if last else []
                last = now
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
        self.texts.add(text)

    async def read_until(self, client: httpx.AsyncClient, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await self.read(client)


def random_request(grammar: Hostile, chance: random.Random) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a request that contains `grammar`, in a random field that accepts its kind."""
    schema = json.loads(grammar.text) if grammar.kind == "json" else None
    messages = [{"role": "user", "content": "Write something."}]
    named = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    ways: Mapping[str, list[tuple[str, dict[str, Any]]]] = {
        "json": [
            (CHAT, {"messages": messages, "response_format": named}),
            (COMPLETION, {"prompt": "JSON:", "guided_json": schema}),
            (LLAMA, {"prompt": "JSON:", "json_schema": schema, "n_predict": REPLY_TOKENS}),
        ],
        "regex": [(COMPLETION, {"prompt": "Text:", "structured_outputs": {"regex": grammar.text}})],
        "gbnf": [
            (LLAMA, {"prompt": "Text:", "grammar": grammar.text, "n_predict": REPLY_TOKENS}),
            (COMPLETION, {"prompt": "Text:", "guided_grammar": grammar.text}),
        ],
        "lark": [(CHAT, {"messages": messages, "guided_grammar": grammar.text})],
    }
    path, fields = chance.choice(ways[grammar.kind])
    return path, {"max_tokens": REPLY_TOKENS, "stream": chance.random() < 0.5, **fields}


@dataclass
class Outcome:
    """Statuses and durations of the hostile requests."""

    statuses: Counter[str] = field(default_factory=Counter)
    seconds: list[tuple[float, int]] = field(default_factory=list)  # (duration in seconds, seed) of each request


async def attack(client: httpx.AsyncClient, seeds: Iterator[int], outcome: Outcome) -> None:
    """Send one request per seed, one after the other."""
    for seed in seeds:
        chance = random.Random(seed)
        path, body = random_request(hostile(chance), chance)
        began = time.perf_counter()
        reply = await client.post(path, json=body)
        outcome.seconds.append((time.perf_counter() - began, seed))
        failed = reply.status_code == 200 and '"error"' in reply.text
        outcome.statuses[f"{reply.status_code}{', ended by an error' if failed else ''}"] += 1


async def measure(url: str, pid: int, first: int, count: int, at_once: int) -> bool:
    """Attack the server and return whether all checks pass."""
    quiet, busy, outcome = Control(), Control(), Outcome()
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        warm = {"prompt": "JSON:", "max_tokens": 5, "guided_json": {"type": "object"}}
        (await client.post(COMPLETION, json=warm)).raise_for_status()
        for _ in range(QUIET_ROUNDS):
            await quiet.read(client)
        before = peak = memory(pid)
        stop, seeds = asyncio.Event(), iter(range(first, first + count))
        reading = asyncio.create_task(busy.read_until(client, stop))
        attacks = asyncio.gather(*(attack(client, seeds, outcome) for _ in range(at_once)))
        while not attacks.done():
            await asyncio.wait([attacks], timeout=0.5)
            peak = max(peak, await asyncio.to_thread(memory, pid))
        stop.set()
        await reading
        attacks.result()
        await asyncio.sleep(SETTLING_SECONDS)
        after = memory(pid)
    return report(quiet, busy, outcome, (before, peak, after))


def report(quiet: Control, busy: Control, outcome: Outcome, megabytes: tuple[float, float, float]) -> bool:
    before, peak, after = megabytes
    slowest = sorted(outcome.seconds, reverse=True)[:5]
    print("answers:", ", ".join(f"{count} x {status}" for status, count in sorted(outcome.statuses.items())))
    print("slowest:", ", ".join(f"{seconds:.2f} s (seed {seed})" for seconds, seed in slowest))
    for name, control in (("alone", quiet), ("under attack", busy)):
        ordered = sorted(control.gaps)
        p99 = ordered[int(0.99 * len(ordered))]
        print(f"stream {name}: {len(ordered)} gaps, p99 {p99 * 1000:.0f} ms, worst {ordered[-1] * 1000:.0f} ms")
    same = quiet.texts == busy.texts and len(busy.texts) == 1
    print("the stream's text under attack:", "the same" if same else "different")
    print(f"memory: {before:.0f} MB before, {peak:.0f} MB at its peak, {after:.0f} MB after")
    checks = {
        "no answer of 5xx": not any(status.startswith("5") for status in outcome.statuses),
        f"no answer after {MAX_SECONDS:g} s": slowest[0][0] <= MAX_SECONDS,
        f"no gap over {MAX_GAP:g} s": max(busy.gaps) <= MAX_GAP,
        "the same text": same,
        "memory is freed": after <= MAX_MEMORY_RATIO * before,
    }
    print("failed checks:", ", ".join(name for name, is_passed in checks.items() if not is_passed) or "none")
    return all(checks.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--count", type=int, default=200, help="number of hostile requests (default: 200)")
    parser.add_argument("--at-once", type=int, default=4, help="number of requests in parallel (default: 4)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first request (default: 0)")
    arguments = parser.parse_args()
    with serving(arguments.model) as (url, pid):
        is_passed = asyncio.run(measure(url, pid, arguments.seed, arguments.count, arguments.at_once))
    sys.exit(not is_passed)


if __name__ == "__main__":
    main()
