"""llama.cpp from the package xllamacpp as a competitor.

It runs in a child process, so that its native library is not loaded into this one. It is measured through the package's
scheduler without HTTP, or over HTTP like any other server.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from app.bench.competitor import CompetitorFailed
from app.bench.completion_client import Endpoint
from app.bench.own_server import ServedCompetitor
from app.bench.sample import Sample, Timeline, sample_of
from app.bench.workload import Load, Prompts
from tests.bench.peers.llama_tools import slot_tokens
from tests.bench.peers.programs import PipedChild, piped_child

PACKAGE = "xllamacpp"
TESTED_VERSION = "2026.10.11549"
_PROGRAM = Path(__file__).with_name("xllamacpp_child.py")


def installed() -> bool:
    return find_spec(PACKAGE) is not None


class XllamacppEngine:
    """The package's engine in a child process, which is idle between loads."""

    name = PACKAGE

    def __init__(self, process: PipedChild, build: str) -> None:
        self.build = build
        self._child = process

    @property
    def pid(self) -> int:
        return self._child.pid

    def warm_up(self, load: Load, prompts: Prompts) -> None:
        self.measure(load, prompts)

    def measure(self, load: Load, prompts: Prompts) -> Sample:
        request = {"prompts": prompts, "output_tokens": load.output_tokens}
        reply = json.loads(self._child.ask(json.dumps(request).encode()))
        if "error" in reply:
            raise CompetitorFailed(f"{PACKAGE}: {reply['error']}")
        if set(reply["tokens"]) != {load.output_tokens}:
            raise CompetitorFailed(f"{PACKAGE} generated {reply['tokens']} tokens instead of {load.output_tokens}")
        streams = zip(reply["arrivals"], reply["tokens"], strict=True)
        return sample_of(load, [Timeline(reply["sent"], arrivals, tokens) for arrivals, tokens in streams])


@contextmanager
def xllamacpp_engine(model: Path, threads: int, loads: Sequence[Load]) -> Iterator[XllamacppEngine]:
    with _start(model, threads, loads) as (process, hello):
        yield XllamacppEngine(process, hello["build"])


@contextmanager
def xllamacpp_server(model: Path, threads: int, loads: Sequence[Load]) -> Iterator[ServedCompetitor]:
    """Start the HTTP server of the package."""
    with _start(model, threads, loads) as (process, hello):
        address = urlsplit(hello["address"])
        endpoint = Endpoint(str(address.hostname), int(address.port or 0), str(model), {"cache_prompt": False})
        yield ServedCompetitor(PACKAGE, hello["build"], process.pid, endpoint)


@contextmanager
def _start(model: Path, threads: int, loads: Sequence[Load]) -> Iterator[tuple[PipedChild, dict[str, Any]]]:
    """Start the child. Yields it and its first message, sent when the model is loaded."""
    streams, slot = max(load.streams for load in loads), max(slot_tokens(load.context + 1) for load in loads)
    options = {"model": str(model), "threads": threads, "streams": streams, "context": streams * slot}
    # Without -P, Python would search the script's folder first, where some modules hide those of the standard library.
    command = [sys.executable, "-P", str(_PROGRAM), json.dumps(options)]
    with piped_child(PACKAGE, command) as process:
        yield process, json.loads(process.read_line())
