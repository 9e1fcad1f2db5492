"""What a long prompt does to others, measured over HTTP.

    python -m tests.torture.long_prompt MODEL [--llama-server PATH]

While a stream is being written, a prompt of 4,000 tokens arrives, and soon after a short request of a person. Printed
for each server and round: the times between the stream's tokens meanwhile, the long prompt's time against its time
alone, and when the person had the first token. The servers take turns.
"""

import argparse
import asyncio
import random
import statistics
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from app.bench.completion_client import Endpoint, stream
from app.bench.own_server import ServedCompetitor, own_server
from app.bench.workload import Load
from app.settings.settings import load_settings
from tests.bench.peers.llama_build import probe
from tests.bench.peers.llama_server import llama_server

LONG, SHORT, REPLY = 4000, 60, 16
BEFORE = 0.5  # seconds that the stream runs alone


@dataclass(frozen=True)
class Round:
    """What one round showed; seconds."""

    gaps: list[float]  # between the stream's tokens, from the long prompt's arrival to its first token
    alone: float
    beside: float
    person: float

    def __str__(self) -> str:
        gaps = sorted(self.gaps)
        return (
            f"stream: median {1e3 * statistics.median(gaps):.0f} ms, p99 {1e3 * gaps[int(0.99 * len(gaps))]:.0f} ms "
            f"of {len(gaps)}; prompt {self.beside:.2f} s, alone {self.alone:.2f} s ({self.beside / self.alone:.2f}x); "
            f"person's first token {self.person:.2f} s"
        )


def prompt(length: int) -> list[int]:
    return [random.randrange(10, 40_000) for _ in range(length)]


def as_person(endpoint: Endpoint) -> Endpoint:
    """Say who waits to a server that wants to know."""
    return endpoint if "cache_prompt" in endpoint.extra else replace(endpoint, extra={"service_class": "interactive"})


async def measure(endpoint: Endpoint, stream_tokens: int) -> Round:
    alone = await stream(endpoint, prompt(LONG), 1)
    solo = alone.arrivals[0] - alone.sent
    running = asyncio.create_task(stream(endpoint, prompt(SHORT), stream_tokens))
    await asyncio.sleep(BEFORE)
    long = asyncio.create_task(stream(endpoint, prompt(LONG), 1))
    await asyncio.sleep(0.2 * solo)
    person = await stream(as_person(endpoint), prompt(SHORT), REPLY)
    read, streamed = await long, await running
    end = read.arrivals[0]
    seen = [at for at in streamed.arrivals if read.sent <= at <= end]
    gaps = [b - a for a, b in zip(seen, [*seen[1:], end], strict=True)]
    return Round(gaps, solo, end - read.sent, person.arrivals[0] - person.sent)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("model", type=Path)
    arguments.add_argument("--llama-server", type=Path)
    arguments.add_argument("--threads", type=int, default=2)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--stream-tokens", type=int, default=600)
    wanted = arguments.parse_args()
    with ExitStack() as resources:
        servers: list[ServedCompetitor] = [
            resources.enter_context(own_server(wanted.model, load_settings(), wanted.threads))
        ]
        if wanted.llama_server:
            loads = [Load(LONG, wanted.stream_tokens, 3)]
            peer = llama_server(probe(wanted.llama_server), wanted.model, wanted.threads, loads)
            servers.append(resources.enter_context(peer))
        for _ in range(wanted.rounds):
            for server in servers:
                print(server.name, asyncio.run(measure(server.endpoint, wanted.stream_tokens)), flush=True)


if __name__ == "__main__":
    main()
