"""llama-server as a competitor: its arguments, its sample, and its failures."""

import os
from pathlib import Path

import pytest

from app.bench.competitor import CompetitorFailed
from app.bench.workload import Load
from tests.bench.peers.fake_llama import FakeLlama
from tests.bench.peers.llama_build import probe
from tests.bench.peers.llama_server import llama_server


def test_llama_server_starts_with_enough_slots_and_context(fake_llama: FakeLlama) -> None:
    loads = [Load(60, 8, 16), Load(500, 8)]
    with llama_server(probe(fake_llama.server), Path("/models/tiny.gguf"), 2, loads) as server:
        sample = server.measure(loads[0], loads[0].prompts(1, 100))
        assert server.name == "llama.cpp"
    assert len(sample.first_token) == 16
    [*_, arguments] = fake_llama.calls("llama-server")
    port = arguments[arguments.index("--port") + 1]
    assert arguments == [
        "-m", "/models/tiny.gguf", "--host", "127.0.0.1", "--port", port, "-t", "2", "-tb", "2",
        "-np", "16", "-c", str(16 * 512), "--no-slots", "--cache-ram", "0",
    ]  # fmt: skip
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)


def test_server_death_during_reply_raises(fake_llama: FakeLlama) -> None:
    load = Load(8, 8)
    with (
        pytest.raises(CompetitorFailed, match=r"server at 127\.0\.0\.1"),
        llama_server(probe(fake_llama.server), Path("/models/dies.gguf"), 1, [load]) as server,
    ):
        server.measure(load, load.prompts(1, 100))
