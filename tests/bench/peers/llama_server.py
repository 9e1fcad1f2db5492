"""llama-server as a competitor: a child process on a port of its own."""

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

# Options of llama-server that spare time, for builds that know them. The benchmark uses none of what they turn off.
_SPARED = {"--no-webui": (), "--no-slots": (), "--cache-ram": ("0",)}


@contextmanager
def llama_server(build: LlamaBuild, model: Path, threads: int, loads: Sequence[Load]) -> Iterator[ServedCompetitor]:
    """Start llama-server with as many slots as the loads need, each as long as the longest of them."""
    streams, slot = max(load.streams for load in loads), max(slot_tokens(load.context + 1) for load in loads)
    port = free_port()
    command = [str(build.server), "-m", str(model), "--host", "127.0.0.1", "--port", str(port)]
    command += ["-t", str(threads), "-tb", str(threads), "-np", str(streams), "-c", str(streams * slot)]
    for option, values in _SPARED.items():
        command += [option, *values] if option in build.server_options else []
    with child("llama-server", command) as process:
        process.wait_for(lambda: answers(f"http://127.0.0.1:{port}"))
        endpoint = Endpoint("127.0.0.1", port, str(model), {"cache_prompt": False})
        yield ServedCompetitor(NATIVE_NAME, build.description, process.pid, endpoint)
