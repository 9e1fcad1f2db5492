"""Streams that start while their requests wait for a model: events of each API, and errors of the load."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest
from starlette.types import Message

from app.server.http import holds
from app.server.http.endpoint import Framing
from app.server.http.holds import EarlyEvents
from app.server.http.reply import stream_head
from quant.errors import ModelFileError
from tests.app.server.dialects.ollama.real_client import client
from tests.app.server.loading_server import LoadingServer
from tests.support.processes import until

HELLO: Any = [{"role": "user", "content": "Hello"}]
DAMAGED = "b.gguf is damaged"


@pytest.fixture
def server(loading_server: LoadingServer, monkeypatch: pytest.MonkeyPatch) -> LoadingServer:
    monkeypatch.setattr(holds, "EARLY_SECONDS", 0.05)
    monkeypatch.setattr(EarlyEvents, "seconds", 0.05)
    return loading_server


@pytest.fixture
def heads(monkeypatch: pytest.MonkeyPatch) -> list[Framing]:
    """The framings of streams that started early."""
    sent: list[Framing] = []

    def head(framing: Framing) -> Message:
        sent.append(framing)
        return stream_head(framing)

    monkeypatch.setattr(holds, "stream_head", head)
    return sent


@pytest.fixture
def http(server: LoadingServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as http:
        yield http


def streamed(server: LoadingServer, http: httpx.Client, path: str, **body: Any) -> tuple[str, str]:
    """Return the text of a stream before the load of its model ends, and the text after it."""
    with server.loader.held(), http.stream("POST", path, json={"model": "b", "stream": True, **body}) as reply:
        assert reply.status_code == 200
        text = reply.iter_text()
        early = next(text)
        server.loader.release()
        return early, "".join(text)


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


CHATS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 2},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/completion": {"prompt": "Hi", "n_predict": 2},
}


@pytest.mark.parametrize("path", CHATS)
def test_comments_report_the_load(server: LoadingServer, http: httpx.Client, path: str) -> None:
    early, rest = streamed(server, http, path, **CHATS[path])
    assert early.startswith((": waiting b", ": loading b"))
    assert events(early) == []
    assert events(rest)


def test_chunks_report_the_load_on_request(server: LoadingServer, http: httpx.Client) -> None:
    body = {**CHATS["/v1/chat/completions"], "return_progress": True}
    server.loader.errors["b"] = ModelFileError(f"/models/{DAMAGED}")
    early, rest = streamed(server, http, "/v1/chat/completions", **body)
    assert events(early)[0]["load_progress"]["status"].startswith(("waiting b", "loading b"))
    assert DAMAGED in events(rest)[-1]["error"]["message"]
    server.residents.of("b").retry_at = 0
    early, rest = streamed(server, http, "/v1/chat/completions", **body)
    chunks = events(early + rest)
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    assert {chunk["model"] for chunk in chunks} == {"b"}
    loads = [chunk["load_progress"] for chunk in chunks if "load_progress" in chunk]
    assert all(0 <= load["progress"] <= 1 for load in loads)
    assert [chunk["choices"] for chunk in chunks[: len(loads)]] == [[]] * len(loads)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    later = {"model": "b", "stream": True, **body}
    assert "load_progress" not in http.post("/v1/chat/completions", json=later).text


def test_anthropic_stream_starts_with_pings(server: LoadingServer, http: httpx.Client) -> None:
    early, rest = streamed(server, http, "/v1/messages", messages=HELLO, max_tokens=2)
    assert events(early)[0] == {"type": "ping"}
    kinds = [event["type"] for event in events(rest)]
    assert "message_start" in kinds
    assert kinds[-1] == "message_stop"


def test_response_is_queued_during_the_load(server: LoadingServer, http: httpx.Client) -> None:
    early, rest = streamed(server, http, "/v1/responses", input="Hi", max_output_tokens=2)
    written = events(early + rest)
    assert [event["type"] for event in written[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    assert [event["sequence_number"] for event in written] == list(range(len(written)))
    assert len({event["response"]["id"] for event in (*written[:3], written[-1])}) == 1
    assert written[-1]["type"] == "response.incomplete"
    assert http.get(f"/v1/responses/{written[0]['response']['id']}").status_code == 200


def test_lm_studio_chat_reports_the_load(server: LoadingServer, http: httpx.Client) -> None:
    early, rest = streamed(server, http, "/api/v1/chat", input="Hi", max_output_tokens=2)
    written = events(early + rest)
    kinds = [event["type"] for event in written]
    assert kinds[:3] == ["chat.start", "model_load.start", "model_load.progress"]
    end = kinds.index("model_load.end")
    assert kinds[end + 1] == "prompt_processing.start"
    assert kinds.count("chat.start") == 1
    assert 0 < written[end]["load_time_seconds"] < 60
    assert all(event["model_instance_id"] == "b" for event in written[: end + 1])
    assert kinds[-1] == "chat.end"


def test_streams_of_loaded_models_have_no_further_events(server: LoadingServer, http: httpx.Client) -> None:
    for _ in range(2):
        body = {"model": "b", "stream": True, "input": "Hi", "max_output_tokens": 2}
        kinds = [event["type"] for event in events(http.post("/v1/responses", json=body).text)]
    assert "response.queued" not in kinds


def failed(server: LoadingServer, heads: list[Framing], ask: Callable[[], Any]) -> Any:
    """Make the load of a model fail after the stream of its first request has started. Returns the client's error."""
    server.loader.errors["b"] = ModelFileError(f"/models/{DAMAGED}")
    with ThreadPoolExecutor() as threads, server.loader.held():
        asking = threads.submit(ask)
        until(lambda: len(heads) > 0)
        heads.clear()
        server.loader.release()
        return asking.exception()


def test_failed_load_ends_a_stream_with_an_error_of_its_api(server: LoadingServer, heads: list[Framing]) -> None:
    def ask_openai() -> None:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
            list(api.chat.completions.create(model="b", messages=HELLO, stream=True))

    assert DAMAGED in failed(server, heads, ask_openai).message


def test_failed_load_fails_a_response(server: LoadingServer, http: httpx.Client) -> None:
    server.loader.errors["b"] = ModelFileError(f"/models/{DAMAGED}")
    early, rest = streamed(server, http, "/v1/responses", input="Hi")
    written = events(early + rest)
    assert [event["type"] for event in written] == ["response.created", "response.queued", "response.failed", "error"]
    assert [event["sequence_number"] for event in written] == [0, 1, 2, 3]
    assert written[2]["response"]["status"] == "failed"
    assert DAMAGED in written[2]["response"]["error"]["message"]
    assert DAMAGED in written[3]["message"]


def test_failed_load_reaches_clients_of_anthropic_and_ollama(server: LoadingServer, heads: list[Framing]) -> None:
    def ask_anthropic() -> None:
        with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as api:
            list(api.messages.create(model="b", messages=HELLO, max_tokens=2, stream=True))

    def ask_ollama() -> None:
        with client(server) as api:
            list(api.chat("b", HELLO, stream=True))

    error = failed(server, heads, ask_anthropic)
    assert isinstance(error, anthropic.APIStatusError)
    assert DAMAGED in error.message
    server.residents.of("b").retry_at = 0
    error = failed(server, heads, ask_ollama)
    assert isinstance(error, ollama.ResponseError)
    assert DAMAGED in error.error


def test_failed_load_ends_a_chat_of_lm_studio(server: LoadingServer, http: httpx.Client) -> None:
    server.loader.errors["b"] = ModelFileError(f"/models/{DAMAGED}")
    early, rest = streamed(server, http, "/api/v1/chat", input="Hi")
    last = events(early + rest)[-1]
    assert last["type"] == "error"
    assert DAMAGED in last["error"]["message"]


def test_requests_that_do_not_stream_fail_with_a_status(server: LoadingServer, http: httpx.Client) -> None:
    server.loader.errors["b"] = ModelFileError(f"/models/{DAMAGED}")
    answer = http.post("/v1/chat/completions", json={"model": "b", "messages": HELLO})
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, f"{DAMAGED}.")
    refused = http.post("/v1/chat/completions", json={"messages": HELLO}, headers={"X-Ingle-Wait": "0"})
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
