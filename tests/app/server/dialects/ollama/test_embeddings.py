"""Embeddings through the real ollama client, compared with exact vectors."""

from collections.abc import Iterator

import ollama
import pytest
from torch.nn import functional as F

from tests.app.server.dialects.ollama.real_client import client
from tests.app.server.dialects.openai.test_embeddings import EmbeddingServer, vector
from tests.app.server.live_server import LiveServer
from tests.app.text.small_wordpiece import ids


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddingServer]:
    with EmbeddingServer() as server:
        yield server


def test_each_text_has_its_vector(server: EmbeddingServer) -> None:
    texts = ["hello world", "a", "hello world"]
    pieces = [("hello", "wor", "##ld"), ("a",), ("hello", "wor", "##ld")]
    expected = [vector(ids(*several)) for several in pieces]
    with client(server) as api:
        reply = api.embed("digest", texts)
        assert [list(one) for one in reply.embeddings] == [one.tolist() for one in expected]
        assert reply.prompt_eval_count == sum(len(ids(*several)) for several in pieces)
        assert api.embed("digest", texts[0]).embeddings == reply.embeddings[:1]
        assert list(api.embeddings("digest", texts[1]).embedding) == expected[1].tolist()
        [short] = api.embed("digest", texts[1], dimensions=3).embeddings
        assert list(short) == F.normalize(expected[1][:3], dim=0).tolist()
        assert api.show("digest").capabilities == ["embedding"]


def test_long_texts_are_cut_unless_truncate_is_false(server: EmbeddingServer) -> None:
    text = "hello world " * 20
    with client(server) as api:
        assert api.embed("digest", text).prompt_eval_count == server.service.context_length
        with pytest.raises(ollama.ResponseError, match=r"input length exceeds the context length: .* at most 12"):
            api.embed("digest", text, truncate=False)


def test_empty_input_has_no_vector(server: EmbeddingServer) -> None:
    with client(server) as api:
        assert api.embed("digest", []).embeddings == []
        assert list(api.embeddings("digest", "").embedding) == []
        assert api.embed("digest", "").embeddings == []
        assert api.embed("digest", ["", "a"]).embeddings[1] == api.embed("digest", "a").embeddings[0]
        with pytest.raises(
            ollama.ResponseError, match="dimensions: the model's vectors have 6 dimensions, fewer than 7"
        ):
            api.embed("digest", "a", dimensions=7)


def test_embedding_model_refuses_chats_and_chat_model_refuses_embeddings(
    server: EmbeddingServer, hash_server: LiveServer
) -> None:
    with client(server) as api, pytest.raises(ollama.ResponseError, match="generates no text"):
        api.chat("digest", [{"role": "user", "content": "Hi"}])
    with client(hash_server) as api, pytest.raises(ollama.ResponseError, match="returns no embeddings"):
        api.embed("hash", "Hi")
