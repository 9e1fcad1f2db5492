"""LM Studio's list of models: what editors find out before they use one."""

from collections.abc import Iterator

import httpx
import pytest

from tests.app.server.dialects.openai.test_embeddings import EmbeddingServer
from tests.app.server.live_server import LiveServer


@pytest.fixture(scope="module")
def vectors() -> Iterator[EmbeddingServer]:
    with EmbeddingServer() as server:
        yield server


def get(url: str, path: str) -> httpx.Response:
    return httpx.get(f"{url}{path}", trust_env=False)


def test_the_model_is_loaded_with_its_context(hash_server: LiveServer, vectors: EmbeddingServer) -> None:
    [listed] = get(hash_server.url, "/api/v0/models").json()["data"]
    assert (listed["id"], listed["type"], listed["state"]) == ("hash", "llm", "loaded")
    assert (listed["loaded_context_length"], listed["max_context_length"]) == (2048, 2048)
    assert listed["capabilities"] == []
    assert get(hash_server.url, "/api/v0/models/hash").json() == listed
    assert get(hash_server.url, "/api/v0/models/other").status_code == 404
    [other] = get(vectors.url, "/api/v0/models").json()["data"]
    assert (other["id"], other["type"]) == ("digest", "embeddings")
