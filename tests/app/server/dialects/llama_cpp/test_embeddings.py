"""The embedding endpoint of llama.cpp's server, compared with exact vectors."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.app.server.dialects.openai.test_embeddings import EmbeddingServer, vector
from tests.app.server.live_server import LiveServer
from tests.app.text.small_wordpiece import ids

HELLO, A = vector(ids("hello")), vector(ids("a"))


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddingServer]:
    with EmbeddingServer() as server:
        yield server


def embed(server: EmbeddingServer | LiveServer, **asked: Any) -> Any:
    return httpx.post(f"{server.url}/embedding", json=asked, trust_env=False, timeout=60).json()


def test_text_or_ids_return_a_list_with_one_vector(server: EmbeddingServer) -> None:
    expected = [{"index": 0, "embedding": [HELLO.tolist()]}]
    for content in ("hello", ["hello"], list(ids("hello")), [list(ids("hello"))], {"prompt_string": "hello"}):
        assert embed(server, content=content) == expected
    assert embed(server, input="hello") == expected


def test_several_inputs_return_vectors_in_order(server: EmbeddingServer) -> None:
    reported = embed(server, content=["hello", list(ids("a")), {"prompt_string": "hello"}])
    assert [(one["index"], one["embedding"]) for one in reported] == [
        (0, [HELLO.tolist()]),
        (1, [A.tolist()]),
        (2, [HELLO.tolist()]),
    ]


def test_vectors_have_the_requested_norm(server: EmbeddingServer) -> None:
    def reported(norm: int) -> list[float]:
        [vector] = embed(server, content="hello", embd_normalize=norm)[0]["embedding"]
        return [abs(number) for number in vector]

    assert reported(2) == HELLO.abs().tolist()
    assert sum(reported(1)) == pytest.approx(1)
    assert max(reported(0)) == pytest.approx(32760)
    assert sum(number**3 for number in reported(3)) == pytest.approx(1)


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({}, "content: it is required"),
        ({"content": []}, "content"),
        ({"content": "a", "embd_normalize": -1}, "embd_normalize: this version returns normalized vectors only"),
        ({"content": [1, "a"]}, "content: an input must be a string or token ids"),
        ({"content": ["a", [10**6]]}, "content[1]: token id 1000000"),
        ({"content": ["a"] * 2049}, "content: 2049 inputs exceed the limit of 2048"),
        ({"content": "a", "model": "other"}, "does not exist here"),
    ],
)
def test_error_names_the_invalid_field(server: EmbeddingServer, asked: dict[str, Any], problem: str) -> None:
    assert problem in embed(server, **asked)["error"]["message"]


def test_chat_model_refuses_embeddings(hash_server: LiveServer) -> None:
    assert "returns no embeddings" in embed(hash_server, content="a")["error"]["message"]
