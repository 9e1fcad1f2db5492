"""Requests with a hostile value in any declared field are answered, or refused in the error format of their dialect.

`--cases 50000` tries every field with every value, and more. The default is a random sample.
"""

import asyncio
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import pytest
from starlette.types import Message

from app.generation.template import ChatTemplateRenderer
from app.server.application import AccessPolicy
from app.server.dialects.anthropic.requests import MessageRequest, TokenCountRequest
from app.server.dialects.llama_cpp import requests as llama_cpp
from app.server.dialects.llama_cpp import token_requests
from app.server.dialects.lm_studio.requests import ChatRequest
from app.server.dialects.ollama import requests as ollama
from app.server.dialects.ollama.requests import EmbedRequest
from app.server.dialects.openai.chat_requests import ChatCompletionRequest
from app.server.dialects.openai.completion_requests import CompletionRequest
from app.server.dialects.openai.embedding_requests import EmbeddingRequest
from app.server.dialects.openai.embeddings import EMBEDDINGS
from app.server.dialects.rerank import RerankRequest
from app.server.dialects.responses.requests import ResponseRequest
from app.server.http.access import Authenticator
from app.text.tokenizer import Tokenizer
from tests.app.server.dialects.openai.test_embeddings import EmbeddingServer
from tests.app.server.hostile_fields import HOSTILE, Field, fields_of, hostile_bodies
from tests.app.server.live_server import LiveServer, controlled_engine
from tests.app.server.served_application import ServedApplication
from tests.app.server.test_bad_requests import CHAT, COMPLETION, VALID
from tests.support.processes import until

KEY = "sk-of-the-test"
RERANK = "/v1/rerank"
RESPONSES = "/v1/responses"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
USER = {"role": "user", "content": "Hi"}
MESSAGE: dict[str, Any] = {"model": "hash", "messages": [USER], "max_tokens": 1}
FIELDS: dict[str, list[Field]] = {
    CHAT: fields_of(ChatCompletionRequest, VALID[CHAT]),
    COMPLETION: fields_of(CompletionRequest, VALID[COMPLETION]),
    RESPONSES: fields_of(ResponseRequest, {"model": "hash", "input": "a", "max_output_tokens": 1}),
    EMBEDDINGS: fields_of(EmbeddingRequest, {"model": "digest", "input": "a"}),
    MESSAGES: fields_of(MessageRequest, MESSAGE),
    COUNT: fields_of(TokenCountRequest, MESSAGE),
    "/api/chat": fields_of(ollama.ChatRequest, {"model": "hash", "messages": [USER], "options": {"num_predict": 1}}),
    "/api/generate": fields_of(ollama.GenerateRequest, {"model": "hash", "prompt": "a", "options": {"num_predict": 1}}),
    "/api/embed": fields_of(EmbedRequest, {"model": "digest", "input": "a"}),
    "/completion": fields_of(llama_cpp.CompletionRequest, {"prompt": "a", "n_predict": 1}),
    "/infill": fields_of(llama_cpp.InfillRequest, {"input_prefix": "a", "n_predict": 1}),
    "/tokenize": fields_of(token_requests.TokenizeRequest, {"content": "a"}),
    "/detokenize": fields_of(token_requests.DetokenizeRequest, {"tokens": [1]}),
    "/apply-template": fields_of(token_requests.TemplateRequest, {"messages": [USER]}),
    "/embedding": fields_of(token_requests.EmbeddingRequest, {"content": "a"}),
    "/api/v1/chat": fields_of(ChatRequest, {"input": "a", "max_output_tokens": 1}),
    RERANK: fields_of(RerankRequest, {"model": "digest", "query": "a", "documents": ["b"]}),
}
LLAMA_CPP = ("/completion", "/infill", "/tokenize", "/detokenize", "/apply-template", "/embedding")
OLLAMA = ("/api/chat", "/api/generate", "/api/embed")
LM_STUDIO = "/api/v1/chat"
# Keys of error objects that are not in OpenAI's format, by path.
SHAPES = {path: {"message", "type"} for path in (MESSAGES, COUNT, *LLAMA_CPP)}
for path in LLAMA_CPP:
    SHAPES[path].add("code")


Servers = Mapping[str, ServedApplication]


@pytest.fixture(scope="module")
def servers(tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> Iterator[Servers]:
    """The server to use for each path."""
    engine, _ = controlled_engine(tokenizer.vocab_size, context=128, contexts=16)
    policy = AccessPolicy(Authenticator([KEY]))
    with (
        LiveServer("hash", engine, tokenizer, renderer, policy=policy) as chat,
        EmbeddingServer(policy=policy) as embeddings,
        EmbeddingServer(ranks=True, policy=policy) as rerank,
    ):
        embedded = {**dict.fromkeys((EMBEDDINGS, "/api/embed", "/embedding"), embeddings), RERANK: rerank}
        yield {**dict.fromkeys(FIELDS, chat), **embedded}
        until(lambda: not engine.has_work)
    engine.assert_empty()


async def answered(server: ServedApplication, path: str, body: bytes) -> tuple[int, bytes]:
    """Call the application directly. Returns the status and the body of the response."""
    unread, sent = [body], list[Message]()

    async def receive() -> Message:
        if not unread:
            await asyncio.sleep(1 << 20)
        return {"type": "http.request", "body": unread.pop()}

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"x-api-key", KEY.encode())]
    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
    await server.application(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


def test_fields_at_any_depth_are_found() -> None:
    paths = {field.path for field in FIELDS[CHAT]}
    assert {("n",), ("messages", 0, "role"), ("messages", 0, "tool_calls", 0, "function", "name")} <= paths
    assert {("response_format", "json_schema", "schema"), ("stop", 0), ("logit_bias", "a")} <= paths


@pytest.mark.parametrize("path", FIELDS)
def test_hostile_fields_are_refused_or_answered(servers: Servers, path: str, cases: int, seed: int) -> None:
    async def ask(bodies: Sequence[str]) -> None:
        for body in bodies:
            status, answer = await answered(servers[path], path, body.encode("utf-8", "surrogatepass"))
            assert status < 500, (status, body[:2000], answer)
            if status == 200:
                continue
            assert len(answer) < 16_000, body[:2000]
            error = json.loads(answer)["error"]
            if path in OLLAMA:
                assert isinstance(error, str), body[:2000]
                assert error, body[:2000]
                continue
            if path == LM_STUDIO:
                assert {"message", "type"} <= error.keys() <= {"message", "type", "param", "code"}, body[:2000]
                assert error["type"] == ("model_not_found" if status == 404 else "invalid_request"), body[:2000]
                continue
            if path in LLAMA_CPP and error["type"] == "exceed_context_size_error":
                assert error.keys() == {"code", "message", "type", "n_prompt_tokens", "n_ctx"}, body[:2000]
                continue
            if path not in SHAPES and "n_ctx" in error:
                assert error["code"] == "context_length_exceeded", body[:2000]
                assert error.pop("n_prompt_tokens") >= error.pop("n_ctx") > 0, body[:2000]
            if path in SHAPES and status == 404:
                error["type"] = error["type"].replace("not_found_error", "invalid_request_error")
            assert error.keys() == SHAPES.get(path, {"message", "type", "param", "code"}), body[:2000]
            assert (error["type"], bool(error["message"])) == ("invalid_request_error", True), body[:2000]

    bodies = hostile_bodies(FIELDS[path], cases // len(FIELDS), random.Random(f"{seed} {path}"))
    while some := list(islice(bodies, 100)):
        servers[path].call(ask(some))


def test_hostile_values_have_all_json_types() -> None:
    assert len(set(HOSTILE)) == len(HOSTILE) > 90
