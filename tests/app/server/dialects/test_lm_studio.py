"""LM Studio's APIs: its lists of models, its own chat endpoint, and OpenAI's endpoints with its statistics."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from app.generation.template import ChatTemplateRenderer
from app.text.tokenizer import Tokenizer
from tests.app.server.dialects.openai.test_chat import expected_text
from tests.app.server.dialects.openai.test_embeddings import EmbeddingServer, vector
from tests.app.server.live_server import LiveServer, controlled_engine
from tests.app.server.scripted_server import ScriptedServer
from tests.app.text.small_wordpiece import ids

ASKED = "What is the capital of France?"


@pytest.fixture(scope="module")
def vectors() -> Iterator[EmbeddingServer]:
    with EmbeddingServer() as server:
        yield server


def get(url: str, path: str) -> httpx.Response:
    return httpx.get(f"{url}{path}", trust_env=False)


def post(url: str, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}{path}", json=body, trust_env=False, timeout=60)


def chat(server: LiveServer, **asked: Any) -> dict[str, Any]:
    body = {"model": server.service.name, "input": ASKED, "max_output_tokens": 20, "top_k": 0, **asked}
    answer = post(server.url, "/api/v1/chat", **body)
    assert answer.status_code == 200, answer.text
    reply: dict[str, Any] = answer.json()
    return reply


def events(server: LiveServer, **asked: Any) -> list[dict[str, Any]]:
    body = {"input": ASKED, "max_output_tokens": 20, "top_k": 0, "stream": True, **asked}
    reported = []
    for block in post(server.url, "/api/v1/chat", **body).text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        reported.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {reported[-1]['type']}"
    return reported


def test_list_shows_the_model_loaded_with_its_context(hash_server: LiveServer, vectors: EmbeddingServer) -> None:
    [listed] = get(hash_server.url, "/api/v0/models").json()["data"]
    assert (listed["id"], listed["type"], listed["state"]) == ("hash", "llm", "loaded")
    assert (listed["loaded_context_length"], listed["max_context_length"]) == (2048, 2048)
    assert listed["capabilities"] == ["tool_use"]
    assert get(hash_server.url, "/api/v0/models/hash").json() == listed
    assert get(hash_server.url, "/api/v0/models/other").status_code == 404
    [other] = get(vectors.url, "/api/v0/models").json()["data"]
    assert (other["id"], other["type"]) == ("digest", "embeddings")


def test_newer_list_has_the_loaded_instance(hash_server: LiveServer, vectors: EmbeddingServer) -> None:
    [listed] = get(hash_server.url, "/api/v1/models").json()["models"]
    assert (listed["key"], listed["type"], listed["format"]) == ("hash", "llm", "gguf")
    assert listed["loaded_instances"] == [{"id": "hash", "config": {"context_length": 2048}}]
    assert listed["capabilities"] == {"trained_for_tool_use": True, "vision": False}
    [other] = get(vectors.url, "/api/v1/models").json()["models"]
    assert (other["key"], other["type"], "capabilities" in other) == ("digest", "embedding", False)


def test_loading_the_served_model_does_nothing(hash_server: LiveServer) -> None:
    path = "/api/v1/models/load"
    loaded = {"type": "llm", "instance_id": "hash", "load_time_seconds": 0, "status": "loaded"}
    assert post(hash_server.url, path, model="hash", flash_attention=True).json() == loaded
    reported = post(hash_server.url, path, model="hash", context_length=1024, echo_load_config=True).json()
    assert reported == {**loaded, "load_config": {"context_length": 2048}}
    longer = post(hash_server.url, path, model="hash", context_length=4096)
    assert (longer.status_code, "context of 2048 tokens" in longer.text) == (400, True)
    other = post(hash_server.url, path, model="other")
    assert (other.status_code, "This server has 'hash'" in other.text) == (404, True)


@pytest.mark.parametrize(
    ("path", "body", "status", "problem"),
    [
        ("/api/v1/models/unload", {"instance_id": "other"}, 404, "does not exist here"),
        ("/api/v1/models/download", {"model": "other"}, 400, "Use POST /api/pull"),
    ],
)
def test_unknown_models_cannot_be_unloaded_or_downloaded(
    hash_server: LiveServer, path: str, body: dict[str, Any], status: int, problem: str
) -> None:
    refused = post(hash_server.url, path, **body)
    assert (refused.status_code, problem in refused.text) == (status, True)


def test_unloaded_model_is_listed_as_not_loaded(tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> None:
    engine, _ = controlled_engine(tokenizer.vocab_size)
    with LiveServer("hash", engine, tokenizer, renderer) as server:
        assert post(server.url, "/api/v1/models/unload", instance_id="hash").json() == {"instance_id": "hash"}
        [older] = httpx.get(f"{server.url}/api/v0/models", trust_env=False).json()["data"]
        [newer] = httpx.get(f"{server.url}/api/v1/models", trust_env=False).json()["models"]
    assert (older["state"], "loaded_context_length" in older) == ("not-loaded", False)
    assert newer["loaded_instances"] == []


def test_stream_and_whole_chat_agree(hash_server: LiveServer) -> None:
    whole = chat(hash_server)
    reported = events(hash_server)
    assert whole["model_instance_id"] == "hash"
    [message] = whole["output"]
    assert expected_text(hash_server, ASKED, 20).startswith(message["content"])
    assert [event["type"] for event in reported[:4]] == [
        "chat.start",
        "prompt_processing.start",
        "prompt_processing.end",
        "message.start",
    ]
    assert [event["type"] for event in reported[-2:]] == ["message.end", "chat.end"]
    assert "".join(event["content"] for event in reported if event["type"] == "message.delta") == message["content"]
    assert reported[-1]["result"]["output"] == whole["output"]
    for reply in (whole, reported[-1]["result"]):
        assert reply["stats"]["total_output_tokens"] == 20
        assert reply["stats"]["input_tokens"] > 5
        assert reply["stats"]["time_to_first_token_seconds"] > 0
        assert reply["response_id"].startswith("resp_")


def test_reasoning_is_separate_from_the_text(scripted_server: ScriptedServer) -> None:
    scripted_server.says("<think>\nHm.\n</think>\n\nYes.")
    whole = chat(scripted_server)
    assert whole["output"] == [{"type": "reasoning", "content": "Hm."}, {"type": "message", "content": "Yes."}]
    assert whole["stats"]["reasoning_output_tokens"] > 0
    names = [event["type"] for event in events(scripted_server)]
    order = ["reasoning.start", "reasoning.delta", "reasoning.end", "message.start", "message.end", "chat.end"]
    assert [name for name in names if name in order] == sorted(
        (name for name in names if name in order), key=order.index
    )


def test_chat_continues_an_earlier_response(hash_server: LiveServer) -> None:
    first = chat(hash_server, system_prompt="Be brief.")
    second = chat(hash_server, input="And more?", previous_response_id=first["response_id"])
    said = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": ASKED},
        {"role": "assistant", "content": first["output"][0]["content"]},
        {"role": "user", "content": "And more?"},
    ]
    counted = post(hash_server.url, "/tokenize", messages=said).json()["count"]
    assert second["stats"]["input_tokens"] == counted
    said[0]["content"] = "Be long."
    asked = {"input": "And more?", "system_prompt": "Be long.", "previous_response_id": first["response_id"]}
    third = chat(hash_server, **asked)
    assert third["output"] == _answer(hash_server, said)
    said += [
        {"role": "assistant", "content": third["output"][0]["content"]},
        {"role": "user", "content": "And then?"},
    ]
    fourth = chat(hash_server, input="And then?", previous_response_id=third["response_id"])
    assert fourth["output"] == _answer(hash_server, said)
    gone = post(hash_server.url, "/api/v1/chat", input="a", previous_response_id="resp_none")
    assert (gone.status_code, gone.json()["error"]["code"]) == (400, "previous_response_not_found")
    unkept = chat(hash_server, store=False)
    assert "response_id" not in unkept


def _answer(server: LiveServer, messages: list[dict[str, str]]) -> list[dict[str, str]]:
    body = {"messages": messages, "max_tokens": 20, "top_k": 0}
    said = post(server.url, "/v1/chat/completions", **body).json()["choices"][0]["message"]["content"]
    return [{"type": "message", "content": said}]


def test_text_parts_become_one_message(hash_server: LiveServer) -> None:
    parts = [{"type": "message", "content": "One"}, {"type": "text", "content": "Two"}]
    assert chat(hash_server, input=parts)["output"] == chat(hash_server, input="One\nTwo")["output"]


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({"input": [{"type": "text"}]}, "input[0].content: it is required"),
        ({"integrations": ["mcp/playwright"]}, "integrations: it is not supported"),
        ({"input": None}, "input"),
        ({"reasoning": "much"}, "reasoning"),
        ({"model": "other"}, "does not exist here"),
        ({"context_length": 3}, "maximum context length is 3 tokens"),
    ],
)
def test_error_names_unsupported_values(hash_server: LiveServer, asked: dict[str, Any], problem: str) -> None:
    for stream in (False, True):
        refused = post(hash_server.url, "/api/v1/chat", **{"input": "a", **asked, "stream": stream})
        error = refused.json()["error"]
        assert (refused.status_code, error["type"]) in ((400, "invalid_request"), (404, "model_not_found"))
        assert problem in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": ASKED}], "max_tokens": 5, "top_k": 0}),
        ("completions", {"prompt": ASKED, "max_tokens": 5, "top_k": 0}),
    ],
)
def test_openai_replies_have_the_older_statistics(hash_server: LiveServer, path: str, body: dict[str, Any]) -> None:
    plain = post(hash_server.url, f"/v1/{path}", **body).json()
    reported = post(hash_server.url, f"/api/v0/{path}", **body).json()
    assert reported["choices"] == plain["choices"]
    assert reported["stats"]["stop_reason"] == "maxPredictedTokensReached"
    assert reported["stats"]["time_to_first_token"] > 0
    assert reported["model_info"]["context_length"] == 2048
    assert reported["runtime"]["name"] == "inglenook"
    stream = post(hash_server.url, f"/api/v0/{path}", **body, stream=True)
    assert stream.text.endswith("data: [DONE]\n\n")
    assert "messages" in post(hash_server.url, "/api/v0/chat/completions").json()["error"]["message"]


def test_embeddings_equal_those_of_the_openai_endpoint(vectors: EmbeddingServer, hash_server: LiveServer) -> None:
    reported = post(vectors.url, "/api/v0/embeddings", model="digest", input="hello").json()
    assert reported["data"][0]["embedding"] == vector(ids("hello")).tolist()
    refused = post(hash_server.url, "/api/v0/embeddings", model="hash", input="hello")
    assert (refused.status_code, "returns no embeddings" in refused.text) == (400, True)
    other = post(vectors.url, "/api/v1/chat", input="hello")
    assert (other.status_code, "generates no text" in other.text) == (400, True)


WEBSOCKET = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    "Sec-WebSocket-Version": "13",
}


@pytest.mark.parametrize("path", ["/lmstudio-greeting", "/llm", "/system", "/embedding"])
def test_sdks_get_an_error_that_names_the_alternatives(
    hash_server: LiveServer, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    for headers in ({}, WEBSOCKET):
        refused = httpx.get(f"{hash_server.url}{path}", headers=headers, trust_env=False)
        assert refused.status_code == 501
        assert "Use an OpenAI client with the base URL /v1" in refused.json()["error"]["message"]
    assert "pip install" not in caplog.text  # uvicorn logs this advice if no WebSocket library is installed
