"""Loads and unloads through the real ollama client."""

import json
import socket
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Any

import httpx
import ollama
import pytest

from app.server.dialects.ollama.requests import EmbedRequest
from app.server.http.errors import InvalidRequest
from tests.app.server.dialects.ollama.real_client import client
from tests.app.server.loading_server import DIGEST, LoadingServer
from tests.support.processes import until

HELLO = [{"role": "user", "content": "Hello"}]
SHORT = {"num_predict": 2}


def loaded(api: ollama.Client) -> list[str | None]:
    return [model.name for model in api.ps().models]


def test_models_are_listed_and_described_without_a_load(loading_server: LoadingServer) -> None:
    with client(loading_server) as api:
        assert [model.model for model in api.list().models] == ["a", "b", "alias", DIGEST]
        assert api.show("b").capabilities == ["completion"]
        assert api.show(DIGEST).capabilities == ["embedding"]
        assert loaded(api) == []
    assert loading_server.loader.loads == []


def test_request_without_a_prompt_loads_or_unloads(loading_server: LoadingServer) -> None:
    with client(loading_server) as api:
        assert api.generate("b").done_reason == "load"
        assert loaded(api) == ["b", "alias"]
        assert api.chat("b").done_reason == "load"
        assert api.generate("alias", keep_alive=0).done_reason == "unload"
        assert loaded(api) == []
        assert api.chat("b", keep_alive="0").done_reason == "unload"
        assert loading_server.loader.loads == ["b"]
        with pytest.raises(ollama.ResponseError, match="does not exist here"):
            api.generate("none", keep_alive=0)


@pytest.mark.parametrize("streams", [False, True])
def test_model_is_unloaded_after_a_request_that_does_not_keep_it(loading_server: LoadingServer, streams: bool) -> None:
    with client(loading_server) as api:
        generate: Any = api.generate
        chat: Any = api.chat
        reply = generate("b", "Hi", options=SHORT, keep_alive=0, stream=streams)
        last = list(reply)[-1] if streams else reply
        assert (last.done_reason, last.eval_count) == ("length", 2)
        until(lambda: loaded(api) == [])
        reply = chat("b", HELLO, options=SHORT, keep_alive=0, stream=streams)
        last = list(reply)[-1] if streams else reply
        assert last.eval_count == 2
        until(lambda: loaded(api) == [])
        assert api.embed(DIGEST, "[UNK]", keep_alive=0).embeddings
        until(lambda: loaded(api) == [])
    assert loading_server.loader.loads == ["b", "b", DIGEST]


@pytest.mark.parametrize("loads", [False, True])
def test_model_is_unloaded_after_a_client_that_does_not_keep_it_disconnects(
    loading_server: LoadingServer, loads: bool
) -> None:
    body = {"model": "b", "messages": HELLO, "keep_alive": 0}
    with client(loading_server) as api, ExitStack() as stack:
        if loads:
            stack.enter_context(loading_server.loader.held())
            loading_server.loader.parts = 6  # more than half, so that the load continues
        else:
            api.generate("b")
        if loads:
            sent = json.dumps(body).encode()
            head = "POST /api/chat HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            with socket.create_connection(("127.0.0.1", loading_server.port)) as leaving:
                leaving.sendall(f"{head}Content-Length: {len(sent)}\r\n\r\n".encode() + sent)
                until(lambda: (task := loading_server.residents.of("b").task) is not None and task.done == 6)
        else:
            url = f"{loading_server.url}/api/chat"
            with httpx.stream("POST", url, json=body, trust_env=False, timeout=60) as reply:
                next(reply.iter_lines())
        loading_server.loader.release()
        until(lambda: loading_server.residents.of("b").loads == 1)
        until(lambda: loaded(api) == [])


def test_running_models_report_when_they_expire(loading_server: LoadingServer) -> None:
    def seconds_left(**kept: Any) -> float:
        api.chat("a", HELLO, options=SHORT, **kept)
        [running] = api.ps().models
        assert running.expires_at is not None
        assert running.size == 50
        return (running.expires_at - datetime.now(UTC)).total_seconds()

    years = 365 * 86400
    with client(loading_server) as api:
        assert seconds_left() > 1000 * years  # the memory is not needed
        assert 80 < seconds_left(keep_alive="1m30s") <= 90
        assert 80 < seconds_left() <= 90  # unchanged
        assert 1790 < seconds_left(keep_alive=1800) <= 1800
        assert seconds_left(keep_alive="-1") > 1000 * years
        assert seconds_left(keep_alive=1e300) > 60 * years


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5m", 300),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("250ms", 0.25),
        ("90", 90),
        ("5", 5),
        ("0", 0),
        ("-1", -1),
        ("-5m", -1),
        (None, None),
        (2.5, 2.5),
        ("99999999h", 2.0**31),
    ],
)
def test_durations_are_parsed(text: str | float | None, seconds: float | None) -> None:
    assert EmbedRequest(keep_alive=text).keep_alive_seconds() == seconds


@pytest.mark.parametrize("text", ["", "-", "5 m", "5x", "m", "h5", "1h 30m", ".", "1_0", "nan", "inf", "9" * 2000])
def test_invalid_durations_are_refused(text: str) -> None:
    request = EmbedRequest(keep_alive=text)
    with pytest.raises(InvalidRequest) as refused:
        request.keep_alive_seconds()
    assert (refused.value.parameter, refused.value.status) == ("keep_alive", 400)


@pytest.mark.parametrize("path", ["chat", "generate", "embed", "embeddings"])
def test_error_names_the_field_before_a_model_is_loaded(loading_server: LoadingServer, path: str) -> None:
    for invalid in ("soon", [5]):
        body = {"model": "a", "keep_alive": invalid}
        answer = httpx.post(f"{loading_server.url}/api/{path}", json=body, trust_env=False)
        assert answer.status_code == 400
        assert "keep_alive" in answer.json()["error"]
    assert loading_server.loader.loads == []


def test_time_to_live_of_other_apis_is_the_same(loading_server: LoadingServer) -> None:
    asked: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": HELLO, "max_tokens": 1},
        "/v1/completions": {"prompt": "Hi", "max_tokens": 1},
        "/v1/responses": {"input": "Hi", "max_output_tokens": 1},
        "/v1/embeddings": {"model": DIGEST, "input": "[UNK]"},
        "/api/v0/chat/completions": {"messages": HELLO, "max_tokens": 1},
        "/api/v1/chat": {"input": "Hi", "max_output_tokens": 1},
        "/api/v1/models/load": {"model": "a"},
    }
    with client(loading_server) as api:
        for seconds, (path, body) in enumerate(asked.items(), start=100):
            answer = httpx.post(f"{loading_server.url}{path}", json={**body, "ttl": seconds}, trust_env=False)
            assert answer.status_code == 200, answer.text
            key = body.get("model", "a")
            assert loading_server.residents.of(key).keep_alive == seconds, path
        httpx.post(f"{loading_server.url}/v1/completions", json={**asked["/v1/completions"], "ttl": 0}, trust_env=False)
        until(lambda: loaded(api) == [DIGEST])
