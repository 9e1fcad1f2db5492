"""llama.cpp as the package xllamacpp brings it, in a process of its own: its library is never loaded into ours.

It runs the loads through the package's own scheduler, without HTTP, or over HTTP as any other server.
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
    """Its engine, asked through a pipe: an idle process between two loads."""

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
            raise CompetitorFailed(f"{PACKAGE} gave {reply['tokens']} tokens, {load.output_tokens} were asked for")
        streams = zip(reply["arrivals"], reply["tokens"], strict=True)
        return sample_of(load, [Timeline(reply["sent"], arrivals, tokens) for arrivals, tokens in streams])


@contextmanager
def xllamacpp_engine(model: Path, threads: int, loads: Sequence[Load]) -> Iterator[XllamacppEngine]:
    with _started(model, threads, loads) as (process, hello):
        yield XllamacppEngine(process, hello["build"])


@contextmanager
def xllamacpp_server(model: Path, threads: int, loads: Sequence[Load]) -> Iterator[ServedCompetitor]:
    """The HTTP server that it opens beside its engine."""
    with _started(model, threads, loads) as (process, hello):
        address = urlsplit(hello["address"])
        endpoint = Endpoint(str(address.hostname), int(address.port or 0), str(model), {"cache_prompt": False})
        yield ServedCompetitor(PACKAGE, hello["build"], process.pid, endpoint)


@contextmanager
def _started(model: Path, threads: int, loads: Sequence[Load]) -> Iterator[tuple[PipedChild, dict[str, Any]]]:
    """The child, and what it says when it has loaded the model."""
    streams, slot = max(load.streams for load in loads), max(slot_tokens(load.context + 1) for load in loads)
    wanted = {"model": str(model), "threads": threads, "streams": streams, "context": streams * slot}
    # Without -P its folder would be searched for modules, and hide some of the standard library's.
    command = [sys.executable, "-P", str(_PROGRAM), json.dumps(wanted)]
    with piped_child(PACKAGE, command) as process:
        yield process, json.loads(process.listen())
