"""Reranking with exact vectors: scores are cosines, and documents are sorted by score."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from app.server.dialects.rerank import PATHS
from tests.app.server.dialects.openai.test_embeddings import CONTEXT, EmbeddingServer, vector
from tests.app.text.small_wordpiece import ids

QUERY, DOCUMENTS = "Hello worlds!", ["hello", "a", "wor", "hello a"]


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddingServer]:
    with EmbeddingServer() as server:
        yield server


def rerank(server: EmbeddingServer, path: str = PATHS[0], **asked: Any) -> httpx.Response:
    body = {"model": "digest", "query": QUERY, "documents": DOCUMENTS, **asked}
    return httpx.post(f"{server.url}{path}", json=body, trust_env=False, timeout=60)


def expected() -> list[tuple[int, float]]:
    query = vector(ids("hello", "wor", "##ld", "##s", "!"))
    read = [ids("hello"), ids("a"), ids("wor"), ids("hello", "a")]
    scores = [(index, float(query @ vector(document))) for index, document in enumerate(read)]
    return sorted(scores, key=lambda scored: -scored[1])


@pytest.mark.parametrize("path", PATHS)
def test_most_relevant_document_comes_first(server: EmbeddingServer, path: str) -> None:
    answer = rerank(server, path).json()
    assert [(one["index"], one["relevance_score"]) for one in answer["results"]] == expected()
    assert all("document" not in one for one in answer["results"])
    assert answer["usage"]["total_tokens"] == 7 + 3 + 3 + 3 + 4
    assert answer["model"] == "digest"


def test_request_without_a_model_uses_the_served_model(server: EmbeddingServer) -> None:
    assert rerank(server, model=None).json()["model"] == "digest"


def test_top_n_and_return_documents_are_followed(server: EmbeddingServer) -> None:
    given = [{"text": text} if index % 2 else text for index, text in enumerate(DOCUMENTS)]
    answer = rerank(server, documents=given, top_n=2, return_documents=True).json()
    assert [one["index"] for one in answer["results"]] == [index for index, _ in expected()[:2]]
    assert [one["document"] for one in answer["results"]] == [{"text": DOCUMENTS[index]} for index, _ in expected()[:2]]
    assert len(rerank(server, top_n=100).json()["results"]) == len(DOCUMENTS)


def test_request_with_texts_returns_a_bare_list(server: EmbeddingServer) -> None:
    answer = rerank(server, documents=None, texts=DOCUMENTS).json()
    assert [(one["index"], one["score"]) for one in answer] == expected()
    assert all(one.keys() == {"index", "score"} for one in answer)
    reported = rerank(server, documents=None, texts=DOCUMENTS, return_text=True, top_n=1).json()
    assert reported == [{**answer[0], "text": DOCUMENTS[answer[0]["index"]]}]
    long = ["hello " * CONTEXT, "a"]
    assert rerank(server, documents=None, texts=long).json()["error"]["param"] == "texts[0]"
    assert len(rerank(server, documents=None, texts=long, truncate=True).json()) == 2
    assert rerank(server, texts=DOCUMENTS).json()["error"]["param"] == "texts"
    assert rerank(server, documents=None).json()["error"]["param"] == "documents"


def test_too_long_documents_are_truncated_or_named_in_the_error(server: EmbeddingServer) -> None:
    long = "hello " * 30
    for asked, name in (({"query": long}, "query"), ({"documents": ["a", long]}, "documents[1]")):
        refused = rerank(server, **asked)
        error = refused.json()["error"]
        assert (refused.status_code, error["param"], error["code"]) == (400, name, "context_length_exceeded")
    cut = rerank(server, query=long, documents=["hello " * CONTEXT], truncate_prompt_tokens=-1).json()
    assert cut["results"][0]["relevance_score"] == pytest.approx(1.0)


def test_cross_encoder_reads_each_document_after_the_query() -> None:
    query = ids("hello", "wor", "##ld", "##s", "!")
    behind = [ids("hello"), ids("a"), ids("wor"), ids("hello", "a")]
    logits = [vector((*query, len(query), *document[1:]))[0].abs() for document in behind]
    scores = [float(logit.sigmoid()) for logit in logits]
    with EmbeddingServer(ranks=True) as server:
        answer = rerank(server).json()
        assert [one["relevance_score"] for one in answer["results"]] == sorted(scores, reverse=True)
        assert {one["index"]: one["relevance_score"] for one in answer["results"]} == dict(enumerate(scores))
        assert answer["usage"]["total_tokens"] == 4 * len(query) + 2 + 2 + 2 + 3
        raw = rerank(server, raw_scores=True).json()["results"]
        assert {one["index"]: one["relevance_score"] for one in raw} == dict(enumerate(map(float, logits)))
        refused = rerank(server, documents=["a", "hello " * 30]).json()["error"]
        assert (refused["param"], refused["code"]) == ("documents[1]", "context_length_exceeded")
        cut = rerank(server, documents=["hello " * 30], truncate_prompt_tokens=-1).json()
        assert cut["usage"]["total_tokens"] == CONTEXT
        vectors = httpx.post(f"{server.url}/v1/embeddings", json={"model": "digest", "input": "a"}, trust_env=False)
        assert (vectors.status_code, "ranks documents" in vectors.text) == (400, True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("query", ""),
        ("query", None),
        ("query", ["a"]),
        ("documents", []),
        ("documents", "a"),
        ("documents", [""]),
        ("documents", [1]),
        ("documents", [{"image": "x"}]),
        ("documents", ["a"] * 2048),
        ("top_n", 0),
        ("top_n", 1.5),
        ("return_documents", "yes"),
        ("truncate_prompt_tokens", -2),
        ("model", "another"),
    ],
)
def test_error_names_the_invalid_field(server: EmbeddingServer, field: str, value: Any) -> None:
    refused = rerank(server, **{field: value})
    assert refused.status_code == (404 if field == "model" else 400)
    assert refused.json()["error"]["param"].startswith(field)
