"""llama-server as a competitor: a child process on a free port."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from app.bench.child import child
from app.bench.completion_client import Endpoint
from app.bench.own_server import ServedCompetitor
from app.bench.workload import Load
from tests.bench.peers.llama_build import LlamaBuild
from tests.bench.peers.llama_tools import NATIVE_NAME, slot_tokens
from tests.support.local_servers import answers, free_port

# Options that turn off features which cost time and which the benchmark does not use, if the build has them.
_COST_OPTIONS = {"--no-webui": (), "--no-slots": (), "--cache-ram": ("0",)}


@contextmanager
def llama_server(build: LlamaBuild, model: Path, threads: int, loads: Sequence[Load]) -> Iterator[ServedCompetitor]:
    """Start llama-server with a slot for each stream; each slot fits the longest context of the loads."""
    streams, slot = max(load.streams for load in loads), max(slot_tokens(load.context + 1) for load in loads)
    port = free_port()
    command = [str(build.server), "-m", str(model), "--host", "127.0.0.1", "--port", str(port)]
    command += ["-t", str(threads), "-tb", str(threads), "-np", str(streams), "-c", str(streams * slot)]
    for option, values in _COST_OPTIONS.items():
        command += [option, *values] if option in build.server_options else []
    with child("llama-server", command) as process:
        process.wait_for(lambda: answers(f"http://127.0.0.1:{port}"))
        endpoint = Endpoint("127.0.0.1", port, str(model), {"cache_prompt": False})
        yield ServedCompetitor(NATIVE_NAME, build.description, process.pid, endpoint)
