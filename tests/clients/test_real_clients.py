"""The clients in the `dev` extra pass the cases of tests/clients/run.sh with the scripted model."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.generation.template import ChatTemplateRenderer
from app.text.gguf_tokenizer import from_gguf
from engine.load_options import LoadOptions
from engine.loading import load_engine, open_checkpoint
from quant.gguf import GGUFFile
from tests.app.server.live_server import LiveServer
from tests.clients.cases import CASES, TOOL_NAME
from tests.clients.driver_process import run_driver
from tests.clients.environments import Installed
from tests.clients.scripted_model import Call, write_scripted_model
from tests.clients.servers import Server
from tests.clients.table import SCRIPTED, Client, read_clients

INSTALLED = Installed(Path(), [Path(sys.executable).parent], {})
CLIENTS = {client.name: client for client in read_clients(Path("note.txt"))}


@pytest.fixture(scope="module")
def server(smollm2: Path, cpu_kernels: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("scripted") / "scripted.gguf"
    write_scripted_model(smollm2, path, [Call(TOOL_NAME, {"city": "Paris"})])
    with GGUFFile(path) as file:
        tokenizer = from_gguf(file.metadata)
    with open_checkpoint(path) as checkpoint:
        engine = load_engine(checkpoint, LoadOptions(context_length=4096, code_cache=cpu_kernels))
    with ChatTemplateRenderer() as renderer, LiveServer(SCRIPTED, engine, tokenizer, renderer) as live:
        yield Server(live.url, SCRIPTED, path.with_suffix(".log"))
    engine.assert_empty()


@pytest.mark.share(2)
@pytest.mark.parametrize("name", ["openai-3", "openai-3-responses", "anthropic", "ollama"])
def test_client_passes_every_case(name: str, server: Server, tmp_path: Path) -> None:
    outcomes = run_driver(CLIENTS[name], INSTALLED, server, tmp_path / "project", CASES)
    assert {case: outcome.detail for case, outcome in outcomes.items() if not outcome.ok} == {}
    assert list(outcomes) == list(CASES)


def test_driver_that_does_not_start_fails_every_case(server: Server, tmp_path: Path) -> None:
    client = Client("missing", "Missing", CLIENTS["ollama"].environment, "no_such_driver", "ollama")
    outcomes = run_driver(client, INSTALLED, server, tmp_path / "project", ["turn", "tool"])
    assert [outcome.ok for outcome in outcomes.values()] == [False, False]
    assert "No module named" in outcomes["tool"].detail
