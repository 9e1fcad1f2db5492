"""Requests that encode, render, or count text.

A disconnect cancels the work, and the number of jobs that run at the same time is limited.
"""

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from app.errors import InvalidGrammar
from app.generation import service as chat_service
from app.generation.service import Preparation
from app.generation.template import ChatTemplateRenderer
from app.process.work_pool import Check, WorkPool
from app.server.http.errors import ContextExceeded, convert_errors
from app.text import long_texts
from app.text.tokenizer import Tokenizer
from engine.errors import PromptTooLong
from tests.app.server.dialects.openai.test_embeddings import EmbeddingServer
from tests.app.server.live_server import Clock, LiveServer, controlled_engine
from tests.app.server.served_application import ServedApplication
from tests.app.server.test_disconnects import hang_up
from tests.support.processes import HANGING_SECONDS, until

MESSAGES = [{"role": "user", "content": "Hello"}]
# Requests to a model that generates text. A model with infill tokens accepts all of them.
WRITING: dict[str, dict[str, Any]] = {
    "/tokenize": {"content": "Hello"},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/apply-template": {"messages": MESSAGES},
    "/completion": {"prompt": ["Hello", 1]},
    "/infill": {"input_prefix": "a", "input_suffix": "b"},
    "/v1/messages/count_tokens": {"model": "hash", "messages": MESSAGES},
    "/v1/responses/input_tokens": {"model": "hash", "input": "Hello"},
    "/v1/completions": {"model": "hash", "prompt": "Hello"},
    "/v1/chat/completions": {"model": "hash", "messages": MESSAGES},
    "/api/generate": {"model": "hash", "prompt": "Hello", "raw": True},
    "/api/show": {"model": "hash"},
    "/inglenook/count": {"text": "Hello"},
    "/inglenook/forget": {"messages": MESSAGES},
}
READING: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"model": "digest", "input": "Hello"},
    "/v1/rerank": {"model": "digest", "query": "Hello", "documents": ["One", "Two"]},
    "/api/embed": {"model": "digest", "input": "Hello"},
}


class HeldPool(WorkPool):
    """A work pool whose jobs never start."""

    def __init__(self) -> None:
        super().__init__("held", 1)
        self.begun = self.cancelled = 0

    async def run(self, work: Callable[[Check], Any]) -> Any:
        self.begun += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled += 1


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch, code_server: LiveServer, embedding_server: EmbeddingServer) -> HeldPool:
    """A pool that replaces all work pools of both servers and never starts a job."""
    pool = HeldPool()
    for service in (code_server.service, embedding_server.service):
        for name, value in vars(service).items():
            if isinstance(value, WorkPool):
                monkeypatch.setattr(service, name, pool)
    return pool


@pytest.fixture(scope="module")
def embedding_server() -> Iterator[EmbeddingServer]:
    with EmbeddingServer() as server:
        yield server


def posted(path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


@pytest.mark.parametrize("path", [*WRITING, *READING])
def test_disconnect_cancels_the_work_on_texts(
    held: HeldPool, code_server: LiveServer, embedding_server: EmbeddingServer, path: str
) -> None:
    server: ServedApplication = embedding_server if path in READING else code_server
    body = (WRITING | READING)[path]
    body = body | ({"model": "starcoder"} if body.get("model") == "hash" else {})

    async def leave() -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(posted(path, body))
        await writer.drain()
        await asyncio.to_thread(until, lambda: held.begun == 1)
        await hang_up(writer)

    asyncio.run(leave())
    until(lambda: held.cancelled == 1)


def test_chats_and_health_work_while_texts_are_encoded(hash_server: LiveServer) -> None:
    """Other requests are answered although more texts wait than the pools have threads."""
    release = threading.Event()

    def wait(check: Check) -> None:
        assert release.wait(HANGING_SECONDS)

    async def occupy() -> None:
        await asyncio.gather(*(hash_server.service.texts.run(wait) for _ in range(40)))

    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=hash_server.url, trust_env=False, timeout=60) as client:
        occupying = pool.submit(lambda: hash_server.call(occupy()))
        try:
            until(lambda: len(hash_server.service.texts._jobs) == 40)
            asked = {"model": "hash", "messages": [{"role": "user", "content": "word " * 20_000}], "max_tokens": 1}
            assert client.post("/v1/chat/completions", json=asked | {"messages": MESSAGES}).status_code == 200
            # this body is large enough to be decoded on a thread
            assert client.post("/v1/chat/completions", json=asked).status_code == 400
            assert client.get("/health").json()["status"] == "ok"
        finally:
            release.set()
        occupying.result(HANGING_SECONDS)


def test_health_is_unavailable_while_texts_make_no_progress(
    hash_server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("texts", "_encoding"):
        with monkeypatch.context() as patch:
            patch.setattr(vars(hash_server.service)[name], "problem", lambda: "no progress")
            answer = httpx.get(f"{hash_server.url}/health", trust_env=False)
            assert (answer.status_code, answer.json()["reason"]) == (503, "no progress")
    assert httpx.get(f"{hash_server.url}/health", trust_env=False).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_health_is_unavailable_while_no_grammar_is_compiled(
    tokenizer: Tokenizer, renderer: ChatTemplateRenderer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    clock, release = Clock(), threading.Event()
    engine, _ = controlled_engine(tokenizer.vocab_size)
    with LiveServer("hash", engine, tokenizer, renderer) as server, ThreadPoolExecutor(1) as clients:
        monkeypatch.setattr(server.service, "preparation", Preparation(clock))

        async def compile_never(source: object) -> object:
            await asyncio.to_thread(release.wait, HANGING_SECONDS)
            raise InvalidGrammar("It is not compiled.")

        def health() -> tuple[int, str]:
            answer = httpx.get(f"{server.url}/health", trust_env=False)
            return answer.status_code, answer.json().get("reason", "")

        monkeypatch.setattr(server.service.grammars, "compile", compile_never)
        body = {"model": "hash", "prompt": "Hi", "messages": MESSAGES, "guided_choice": ["a", "b"]}
        asked = clients.submit(httpx.post, f"{server.url}{path}", json=body, timeout=HANGING_SECONDS, trust_env=False)
        until(lambda: server.service.preparation._waiting == 1)
        assert health() == (200, "")
        clock.seconds += 60.0
        assert health() == (503, "no request was prepared for 60 s")
        release.set()
        assert asked.result(HANGING_SECONDS).status_code == 400
        assert health() == (200, "")


@pytest.mark.parametrize(("path", "field"), [("/tokenize", "content"), ("/inglenook/count", "text")])
def test_texts_of_too_many_tokens_are_refused(
    hash_server: LiveServer, monkeypatch: pytest.MonkeyPatch, path: str, field: str
) -> None:
    monkeypatch.setattr(chat_service, "MAX_COUNTED", 1000)
    for text, status in (("9" * 1000, 200), ("9" * 1001, 400), ("9" * 4_200_000, 400)):
        answer = httpx.post(f"{hash_server.url}{path}", json={field: text}, trust_env=False, timeout=60)
        assert answer.status_code == status, answer.text[:1000]
        if status == 400:
            assert field in answer.text or "more than 1,001 tokens" in answer.text


def test_too_long_prompts_are_refused_before_they_are_fully_encoded(
    hash_server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_texts, "COUNTED", 5000)
    tokenizer = hash_server.service.tokenizer
    characters = 1900 * tokenizer.longest_token  # the context has 2,048 tokens
    before = tokenizer.characters_encoded
    paths = ("/completion", "/v1/completions", "/v1/messages/count_tokens", "/apply-template", "/v1/chat/completions")
    for number, path in enumerate(paths):
        digits = f"{number}{number}7" * (characters // 3)
        body = {"model": "hash", "max_tokens": 1, "prompt": digits, "messages": [{"role": "user", "content": digits}]}
        answer = httpx.post(f"{hash_server.url}{path}", json=body, trust_env=False, timeout=60)
        assert answer.status_code == 400, answer.text[:1000]
        assert re.search(r"prompt is too long|context (length|size)|more than", answer.text), answer.text[:1000]
    assert tokenizer.characters_encoded - before < len(paths) * characters / 3


@pytest.mark.parametrize("longest", [2048, 8192])
def test_error_for_a_long_prompt_has_the_numbers(longest: int) -> None:
    with pytest.raises(ContextExceeded) as refused, convert_errors("messages"):
        raise PromptTooLong.of(5000, 2048, longest, is_exact=False)
    error = refused.value
    assert (error.status, error.code, error.parameter) == (400, "context_length_exceeded", "messages")
    assert (error.too_long.tokens, error.too_long.context, error.too_long.is_exact) == (5000, 2048, False)
    assert error.too_long.fits_longer_context == (longest > 5000)
    assert error.message == "The prompt has more than 5,000 tokens, and the context holds 2,048 including the reply"
    assert ("--context" in error.remedy) == (longest > 5000)
