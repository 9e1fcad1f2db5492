"""`ingle serve` with an embedding model, and a `run` that refuses it."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.app.command_line import ingle
from tests.app.commands.test_serve import Server, environment_of, ready, serve
from tests.app.models.load.test_loaded_encoder import embedding_model
from tests.support.processes import HANGING_SECONDS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return embedding_model(tmp_path_factory.mktemp("model")).folder


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    environment = environment_of(folder / "model.safetensors", tmp_path_factory.mktemp("home"))
    with serve(environment, "--model", str(folder), "--kernels", "reference") as process:
        yield ready(process, environment)
        process.kill()


def test_openai_client_gets_vectors(server: Server, folder: Path) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as api:
        one, two, same = api.embeddings.create(model=str(folder), input=["hello", "world", "hello"]).data
    assert one.embedding == same.embedding != two.embedding
    assert len(one.embedding) == 64


def test_ps_lists_the_server(server: Server, folder: Path) -> None:
    [listed] = server.listed()
    assert (listed["model"], listed["status"], listed["running"]) == (str(folder), "ok", 0)


def test_run_refuses_an_embedding_model(server: Server, folder: Path) -> None:
    asked = server.ingle("run", "Hi", "--model", str(folder))  # the server is running, but cannot answer
    assert asked.returncode == 1
    assert "returns embeddings, and generates no text" in asked.stderr
    alone = ingle(server.environment, "run", "Hi", "--model", str(folder), "--kernels", "reference")
    assert alone.returncode == 1
    assert b"return embeddings and cannot generate text" in alone.stderr


def test_stop_ends_the_server(server: Server) -> None:
    """The last test of this file, because it ends the shared server."""
    assert httpx.get(f"{server.url}/health", trust_env=False).json()["status"] == "ok"
    server.ingle("stop", str(server.port))
    assert server.process.wait(HANGING_SECONDS) == 0
