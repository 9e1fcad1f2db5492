"""Embeddings through the real openai client, compared with exact vectors."""

import base64
import json
import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from openai.types import CreateEmbeddingResponse
from torch import Tensor
from torch.nn import functional as F

from app.generation.embedding_service import STUCK_SECONDS, EmbeddingService
from app.server.application import AccessPolicy, ServerContext, create_application
from app.server.dialects.openai.embeddings import BARE_EMBEDDINGS, EMBEDDINGS
from app.server.embedding_inputs import MAX_INPUTS
from app.server.http.request_body import MAX_BODY_BYTES
from app.text import long_texts
from app.text.encoder_tokenizer import from_json
from tests.app.server.fixed_models import fixed_models
from tests.app.server.live_server import Clock, LiveServer
from tests.app.server.served_application import ServedApplication
from tests.app.text.small_wordpiece import TOKENS, document, ids
from tests.support.processes import HANGING_SECONDS, until

HIDDEN, CONTEXT, THREADS = 6, 12, 2
URL = "http://ingle.test"


def vector(sequence: Sequence[int]) -> Tensor:
    """Return a unit vector that only this token sequence has."""
    random = torch.Generator().manual_seed(hash(tuple(sequence)) % 2**63)
    return F.normalize(torch.randn(HIDDEN, generator=random), dim=0)


class DigestEmbedder:
    """An embedder that computes vectors from digests. A test can hold back its work."""

    hidden, vocab_size, context_length, threads = HIDDEN, len(TOKENS), CONTEXT, THREADS

    failure = ""

    def __init__(self, *, ranks: bool = False) -> None:
        """Create the embedder. With `ranks`, it is a cross-encoder that returns the absolute value of the first
        element.
        """
        self.ranks = ranks
        self._pool = ThreadPoolExecutor(THREADS)
        self._allowed: threading.Semaphore | None = None
        self.computed: list[tuple[int, ...]] = []
        self.submitted = 0
        self.begun: list[tuple[int, ...]] = []

    def submit(self, sequence: Sequence[int], second: int | None = None) -> "Future[Tensor]":
        assert (second is not None) == self.ranks
        self.submitted += 1
        read = (*sequence[:second], second or 0, *sequence[second:]) if self.ranks else tuple(sequence)
        return self._pool.submit(self._compute, read)

    def _compute(self, sequence: tuple[int, ...]) -> Tensor:
        self.begun.append(sequence)
        if self._allowed is not None:
            self._allowed.acquire()
        self.computed.append(sequence)
        return vector(sequence)[:1].abs() if self.ranks else vector(sequence)

    @contextmanager
    def held(self) -> Iterator[threading.Semaphore]:
        """Make each vector wait for one release while the body runs."""
        self._allowed = allowed = threading.Semaphore(0)
        try:
            yield allowed
        finally:
            self._allowed = None
            allowed.release(10_000)

    def encode(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        return torch.stack([self.submit(ids).result() for ids in sequences])

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


class EmbeddingServer(ServedApplication):
    """Serves a `DigestEmbedder` inside its `with` block."""

    def __init__(self, *, ranks: bool = False, policy: AccessPolicy | None = None) -> None:
        self.embedder = DigestEmbedder(ranks=ranks)
        self.service = EmbeddingService("digest", from_json(document()), self.embedder)
        super().__init__(
            create_application(
                fixed_models(self.service), ServerContext(policy or AccessPolicy(host_names=["ingle.test"]))
            )
        )


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddingServer]:
    with EmbeddingServer() as server:
        yield server


def ask(server: EmbeddingServer, **asked: Any) -> CreateEmbeddingResponse:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
        reply: CreateEmbeddingResponse = api.embeddings.create(model="digest", **asked)
    return reply


def refused(server: EmbeddingServer, body: dict[str, Any] | str, path: str = EMBEDDINGS) -> dict[str, Any]:
    content = body if isinstance(body, str) else json.dumps(body)
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{server.url}{path}", content=content, headers=headers, trust_env=False, timeout=60)
    error: dict[str, Any] = answer.json()["error"]
    assert answer.status_code == (404 if error["code"] == "model_not_found" else 400)
    assert error["type"] == "invalid_request_error"
    return error


def assert_vectors(reply: CreateEmbeddingResponse, sequences: Sequence[Sequence[int]]) -> None:
    assert [one.index for one in reply.data] == list(range(len(sequences)))
    for one, sequence in zip(reply.data, sequences, strict=True):
        assert np.array_equal(np.asarray(one.embedding, np.float32), vector(sequence).numpy())


@pytest.mark.parametrize("named", [{}, {"model": None}, {"model": ""}])
def test_request_without_a_model_uses_the_served_model(server: EmbeddingServer, named: dict[str, Any]) -> None:
    answer = httpx.post(f"{server.url}{EMBEDDINGS}", json={"input": "a", **named}, trust_env=False)
    assert (answer.status_code, answer.json()["model"]) == (200, "digest")


@pytest.mark.parametrize("field", ["input", "content"])
def test_path_without_v1_returns_a_list_to_llama_cpp_clients(server: EmbeddingServer, field: str) -> None:
    answer = httpx.post(f"{server.url}{BARE_EMBEDDINGS}", json={field: ["a", "hello"]}, trust_env=False).json()
    listed = httpx.post(f"{server.url}{EMBEDDINGS}", json={"input": ["a", "hello"]}, trust_env=False).json()["data"]
    assert answer == [{"index": one["index"], "embedding": [one["embedding"]]} for one in listed]


def test_path_without_v1_returns_openai_format_to_openai_clients(server: EmbeddingServer) -> None:
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as api:
        assert_vectors(api.embeddings.create(model="digest", input="a"), [ids("a")])
        assert_vectors(api.embeddings.create(model="digest", input="a", encoding_format="float"), [ids("a")])


SEVERAL: dict[str, tuple[Any, list[tuple[int, ...]]]] = {
    "a text": ("Hello worlds!", [ids("hello", "wor", "##ld", "##s", "!")]),
    "texts": (["Hello", "a", "Hello"], [ids("hello"), ids("a"), ids("hello")]),
    "ids": ([2, 4, 3], [(2, 4, 3)]),
    "lists of ids": ([[2, 4, 3], [4]], [(2, 4, 3), (4,)]),
    "texts and lists of ids": (["a", [2, 4, 3]], [ids("a"), (2, 4, 3)]),
}


@pytest.mark.parametrize("encoding", ["float", "base64", None])
@pytest.mark.parametrize("kind", SEVERAL)
def test_each_input_has_its_vector(server: EmbeddingServer, kind: str, encoding: str | None) -> None:
    given, sequences = SEVERAL[kind]
    reply = ask(server, input=given, **({} if encoding is None else {"encoding_format": encoding}))
    if encoding == "base64":  # the client decodes no encoding that the caller requested explicitly
        for one in reply.data:
            raw: Any = one.embedding
            one.embedding = np.frombuffer(base64.b64decode(raw), "<f4").tolist()
    assert_vectors(reply, sequences)
    assert reply.usage.prompt_tokens == reply.usage.total_tokens == sum(map(len, sequences))
    assert (reply.model, reply.object) == ("digest", "list")


def test_dimensions_keeps_the_first_numbers_and_normalizes(server: EmbeddingServer) -> None:
    [whole], [short] = (ask(server, input="a", **more).data for more in ({}, {"dimensions": 4}))
    expected = F.normalize(torch.tensor(whole.embedding[:4]), dim=0)
    assert np.allclose(short.embedding, expected.numpy(), atol=1e-7)
    assert len(ask(server, input="a", dimensions=HIDDEN).data[0].embedding) == HIDDEN


def test_too_long_input_is_cut_only_on_request(server: EmbeddingServer) -> None:
    text, given = "hello " * 30, [4] * 30
    assert refused(server, {"model": "digest", "input": ["a", text]}) == {
        "message": "input[1]: it has 32 tokens, and the model reads at most 12. Send shorter inputs, or set "
        "truncate_prompt_tokens to -1.",
        "type": "invalid_request_error",
        "param": "input[1]",
        "code": "context_length_exceeded",
    }
    cut = ask(server, input=text, extra_body={"truncate_prompt_tokens": -1})
    assert_vectors(cut, [ids(*["hello"] * (CONTEXT - 2))])
    assert_vectors(ask(server, input=text, extra_body={"truncate_prompt_tokens": 4}), [ids("hello", "hello")])
    assert_vectors(ask(server, input=[given], extra_body={"truncate_prompt_tokens": 5}), [(4,) * 5])


BAD = {
    "model": ("1", '"gpt-5"'),
    "input": ("null", "1", "{}", "[]", "[[]]", '["a", 1]', '[1, "a"]', "[[1], 1]", "[true]", "[1.5]", "[[-1]]", "[-1]"),
    "encoding_format": ("1", '"int8"', "[]"),
    "dimensions": ("0", "-1", "1.5", '"4"', "7", str(2**31)),
    "user": ("1",),
    "truncate_prompt_tokens": ("-2", "1.5", '"1"', str(2**31)),
}
CASES = [(field, value) for field, values in BAD.items() for value in values]


@pytest.mark.parametrize(("field", "value"), CASES)
def test_error_names_the_invalid_field(server: EmbeddingServer, field: str, value: str) -> None:
    body = {"model": '"digest"', "input": '"a"', field: value}
    error = refused(server, "{" + ", ".join(f'"{name}": {text}' for name, text in body.items()) + "}")
    assert error["param"].startswith(field)


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ("", "input[0]"),
        (["a", ""], "input[1]"),
        ([len(TOKENS)], "input[0]"),
        ([[1], [1, len(TOKENS)]], "input[1]"),
        ([1] * (CONTEXT + 1), "input[0]"),
        (["a"] * (MAX_INPUTS + 1), "input"),
    ],
)
def test_error_names_the_invalid_input(server: EmbeddingServer, given: Any, param: str) -> None:
    assert refused(server, {"model": "digest", "input": given})["param"] == param


def test_ids_truncated_to_an_empty_input_are_refused(server: EmbeddingServer) -> None:
    error = refused(server, {"model": "digest", "input": [1], "truncate_prompt_tokens": 0})
    assert error["param"] == "input[0]"


@pytest.mark.parametrize("most", [0, 1])
def test_text_cannot_be_cut_below_its_special_tokens(server: EmbeddingServer, most: int) -> None:
    error = refused(server, {"model": "digest", "input": ["hello"], "truncate_prompt_tokens": most})
    assert error["param"] == "input[0]"
    assert f"the limit is {most}" in error["message"]


def test_too_long_body_is_refused(server: EmbeddingServer) -> None:
    content = b'{"model": "digest", "input": "' + b"a" * MAX_BODY_BYTES + b'"}'
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{server.url}{EMBEDDINGS}", content=content, headers=headers, trust_env=False, timeout=60)
    assert answer.status_code == 413


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/chat/completions", "/v1/completions"])
def test_embedding_model_refuses_to_generate(server: EmbeddingServer, path: str) -> None:
    prompt = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": "Hi"}
    error = refused(server, {"model": "digest", **prompt}, path)
    assert "returns embeddings, and generates no text" in error["message"]
    assert f"POST {EMBEDDINGS}" in error["message"]


def test_chat_model_refuses_embeddings(hash_server: LiveServer) -> None:
    with (
        openai.OpenAI(base_url=f"{hash_server.url}/v1", api_key="none", max_retries=0) as api,
        pytest.raises(openai.BadRequestError, match=r"generates text, and returns no embeddings.*Name an embedding"),
    ):
        api.embeddings.create(model="hash", input="a")


def test_embedding_model_is_listed(server: EmbeddingServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as api:
        [model] = api.models.list().data
        assert api.models.retrieve("digest").id == model.id == "digest"


def test_short_request_runs_between_batches_of_a_long_one(server: EmbeddingServer) -> None:
    texts = [[2, index % 10, 3] for index in range(40)]
    with server.embedder.held() as allowed, ThreadPoolExecutor(2) as clients:
        before, submitted = len(server.embedder.computed), server.embedder.submitted
        long = clients.submit(ask, server, input=texts)
        until(lambda: server.embedder.submitted == submitted + THREADS)
        short = clients.submit(ask, server, input=[[5, 5, 5]])
        until(lambda: server.embedder.submitted == submitted + THREADS + 1)
        allowed.release(THREADS + 1)
        assert_vectors(short.result(HANGING_SECONDS), [(5, 5, 5)])
        assert (5, 5, 5) in server.embedder.computed[before : before + 2 * THREADS + 1]
        assert not long.done()
        health = httpx.get(f"{server.url}/health", trust_env=False).json()
        assert (health["status"], health["running"], health["running_by_class"]["normal"]) == ("ok", 1, 1)
        allowed.release(1000)
        assert_vectors(long.result(HANGING_SECONDS), [tuple(text) for text in texts])
    assert server.service.requests == 0


def test_disconnect_ends_the_request(server: EmbeddingServer) -> None:
    body = json.dumps({"model": "digest", "input": [[2, index % 10, 3] for index in range(40)]})
    with server.embedder.held() as allowed:
        before, submitted = len(server.embedder.computed), server.embedder.submitted
        begun = len(server.embedder.begun)
        with closing(HTTPConnection("127.0.0.1", server.port)) as client:
            client.request("POST", EMBEDDINGS, body, {"Content-Type": "application/json"})
            until(lambda: len(server.embedder.begun) == begun + THREADS)
        until(lambda: server.service.requests == 0)
        allowed.release(1000)
    until(lambda: len(server.embedder.computed) == before + THREADS)
    # if any other text were left, it would have been submitted before this one
    assert_vectors(ask(server, input=[[5, 5, 5]]), [(5, 5, 5)])
    assert server.embedder.submitted == submitted + THREADS + 1


def test_waiting_requests_get_503_when_the_server_stops() -> None:
    with EmbeddingServer() as server, server.embedder.held() as allowed, ThreadPoolExecutor(2) as clients:
        asking = clients.submit(ask, server, input=[[index % 10] for index in range(40)])
        until(lambda: server.embedder.submitted == THREADS)
        stopping = clients.submit(server.call, server.service.stop())
        until(lambda: server.service._stopping)
        allowed.release(1000)
        stopping.result(HANGING_SECONDS)
        with pytest.raises(openai.InternalServerError, match="shutting down"):
            asking.result(HANGING_SECONDS)
        with pytest.raises(openai.InternalServerError, match="being stopped"):
            ask(server, input="a")


def test_stuck_texts_make_health_unavailable(server: EmbeddingServer, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(server.service, "_clock", clock)

    def told_after(seconds: float) -> str:
        clock.seconds += seconds
        reason: str = httpx.get(f"{server.url}/health", trust_env=False).json().get("reason", "")
        return reason

    with server.embedder.held() as allowed, ThreadPoolExecutor(1) as clients:
        asked = clients.submit(ask, server, input=["a", "hello", "cafe"])
        until(lambda: server.service.requests == 1)
        assert told_after(STUCK_SECONDS - 1) == ""
        allowed.release()
        until(lambda: server.service._moved_at == clock.seconds)
        assert told_after(STUCK_SECONDS - 1) == ""
        assert told_after(1) == "no text was finished for 60 s"
        allowed.release(2)
        asked.result(HANGING_SECONDS)
    assert told_after(STUCK_SECONDS) == ""


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        (EMBEDDINGS, {"input": ["a", "a b " * 400]}, "input[1]"),
        ("/v1/rerank", {"query": "a", "documents": ["a b " * 400]}, "documents[0]"),
        ("/v1/rerank", {"query": "a b " * 400, "documents": ["a"]}, "query"),
    ],
)
def test_far_too_long_text_is_not_fully_encoded(
    server: EmbeddingServer, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], name: str
) -> None:
    monkeypatch.setattr(long_texts, "PIECE", 50)
    monkeypatch.setattr(long_texts, "COUNTED", 100)
    error = refused(server, {"model": "digest", **body}, path)
    assert (error["code"], error["param"]) == ("context_length_exceeded", name)
    assert re.search(r"has more than 1\d\d tokens, and the model reads at most 12", error["message"])


def test_truncated_text_is_encoded_only_as_far_as_needed(
    server: EmbeddingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_texts, "PIECE", 50)
    tokenizer = server.service.tokenizer
    whole = tokenizer.encode("a b " * 2000)
    assert tokenizer.encode("a b " * 2000, 12) == (*whole[:11], whole[-1])
