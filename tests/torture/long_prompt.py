"""Measure over HTTP how much a long prompt delays other requests.

    python -m tests.torture.long_prompt MODEL [--llama-server PATH]

While a reply is streamed, a prompt of 4,000 tokens arrives, and soon after it a short interactive request. For each
server and round, the report has the times between the tokens of the stream during the prefill of the long prompt, the
time of the long prompt compared with its time alone, and the time to the first token of the short request. The servers
take turns.
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
HEAD_START_SECONDS = 0.5  # time for which the stream runs alone


@dataclass(frozen=True)
class Round:
    """Measurements of one round, in seconds."""

    gaps: list[float]  # times between tokens of the stream, from the arrival of the long prompt to its first token
    alone: float
    contended: float
    interactive: float

    def __str__(self) -> str:
        gaps = sorted(self.gaps)
        return (
            f"stream: median {1e3 * statistics.median(gaps):.0f} ms, p99 {1e3 * gaps[int(0.99 * len(gaps))]:.0f} ms "
            f"of {len(gaps)}; prompt {self.contended:.2f} s, alone {self.alone:.2f} s "
            f"({self.contended / self.alone:.2f}x); short request's first token {self.interactive:.2f} s"
        )


def prompt(length: int) -> list[int]:
    return [random.randrange(10, 40_000) for _ in range(length)]


def as_interactive(endpoint: Endpoint) -> Endpoint:
    """Mark the requests to an endpoint as interactive if its server supports this."""
    return endpoint if "cache_prompt" in endpoint.extra else replace(endpoint, extra={"service_class": "interactive"})


async def measure(endpoint: Endpoint, stream_tokens: int) -> Round:
    alone = await stream(endpoint, prompt(LONG), 1)
    solo = alone.arrivals[0] - alone.sent
    running = asyncio.create_task(stream(endpoint, prompt(SHORT), stream_tokens))
    await asyncio.sleep(HEAD_START_SECONDS)
    long = asyncio.create_task(stream(endpoint, prompt(LONG), 1))
    await asyncio.sleep(0.2 * solo)
    interactive = await stream(as_interactive(endpoint), prompt(SHORT), REPLY)
    read, streamed = await long, await running
    end = read.arrivals[0]
    seen = [at for at in streamed.arrivals if read.sent <= at <= end]
    gaps = [b - a for a, b in zip(seen, [*seen[1:], end], strict=True)]
    return Round(gaps, solo, end - read.sent, interactive.arrivals[0] - interactive.sent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stream-tokens", type=int, default=600)
    arguments = parser.parse_args()
    with ExitStack() as resources:
        servers: list[ServedCompetitor] = [
            resources.enter_context(own_server(arguments.model, load_settings(), arguments.threads))
        ]
        if arguments.llama_server:
            loads = [Load(LONG, arguments.stream_tokens, 3)]
            peer = llama_server(probe(arguments.llama_server), arguments.model, arguments.threads, loads)
            servers.append(resources.enter_context(peer))
        for _ in range(arguments.rounds):
            for server in servers:
                print(server.name, asyncio.run(measure(server.endpoint, arguments.stream_tokens)), flush=True)


if __name__ == "__main__":
    main()
