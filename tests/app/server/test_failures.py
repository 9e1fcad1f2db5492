"""A failing step, a dead engine, an engine that is being stopped: what clients are told, and who is left unharmed."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from app.chat.template import ChatTemplateRenderer
from app.text.tokenizer import Tokenizer
from tests.app.server.live_server import ControlledRunner, LiveServer, controlled_engine, until
from tests.app.server.test_openai_chat import QUESTION, client, expected_text, joined

ASKED: dict[str, Any] = {"model": "hash", "messages": QUESTION, "max_tokens": 20, "extra_body": {"ignore_eos": True}}


@pytest.fixture
def stack(tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> Iterator[tuple[LiveServer, ControlledRunner]]:
    """A server of its own, since these tests break it, and the model behind it."""
    engine, runner = controlled_engine(tokenizer.vocab_size, budget=64)
    with LiveServer("hash", engine, tokenizer, renderer) as server:
        yield server, runner
    engine.assert_empty()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_a_first_step_that_fails_is_a_500_and_the_next_request_works(
    stack: tuple[LiveServer, ControlledRunner], stream: bool, n: int
) -> None:
    server, runner = stack
    with client(server) as api:
        runner.failures = 1
        with pytest.raises(openai.InternalServerError) as failed:
            api.chat.completions.create(**ASKED, stream=stream, n=n)
        assert failed.value.status_code == 500
        assert failed.value.type == "server_error"
        assert "injected" in failed.value.message
        reply = api.chat.completions.create(**ASKED)
    assert reply.choices[0].message.content == expected_text(server, "What is the capital of France?", 20)
    until(lambda: not server.engine.has_work)
    server.engine.assert_empty()


def test_a_later_step_that_fails_ends_the_stream_with_an_error_event(
    stack: tuple[LiveServer, ControlledRunner],
) -> None:
    server, runner = stack
    with client(server) as api:
        runner.steps_allowed = threading.Semaphore(5)
        stream = api.chat.completions.create(**ASKED, stream=True)
        chunks = [next(stream) for _ in range(3)]
        runner.failures = 1
        runner.steps_allowed.release(1000)
        with pytest.raises(openai.APIError, match="injected") as failed:
            chunks += list(stream)
        assert failed.value.type == "server_error"
    text = joined(chunks)
    assert text
    assert expected_text(server, "What is the capital of France?", 20).startswith(text)
    assert all(choice.finish_reason is None for chunk in chunks for choice in chunk.choices)


def test_the_error_event_is_the_last_one(stack: tuple[LiveServer, ControlledRunner]) -> None:
    server, runner = stack
    runner.steps_allowed = threading.Semaphore(3)
    body = {"model": "hash", "messages": QUESTION, "max_tokens": 20, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=None) as response:  # noqa: S113
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.iter_lines()
        first = next(lines)
        runner.failures = 1
        runner.steps_allowed.release(1000)
        events = [line.removeprefix("data: ") for line in (first, *lines) if line]
    assert json.loads(events[-1])["error"]["type"] == "server_error"
    assert "[DONE]" not in events


def test_a_dead_engine_is_a_503_and_so_is_its_health(stack: tuple[LiveServer, ControlledRunner]) -> None:
    server, _ = stack
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok", "running": 0, "waiting": 0}
    server.call(server.streams.stop())
    health = httpx.get(f"{server.url}/health")
    assert health.status_code == 503
    assert health.json()["status"] == "unavailable"
    assert "stopped" in health.json()["reason"]
    with client(server) as api:
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError) as failed:
                api.chat.completions.create(**ASKED, stream=stream)
            assert failed.value.status_code == 503
        assert [model.id for model in api.models.list()] == ["hash"]


def test_stopping_the_engine_ends_streams_with_an_error_event(stack: tuple[LiveServer, ControlledRunner]) -> None:
    server, runner = stack
    runner.steps_allowed = threading.Semaphore(5)
    with client(server) as api:
        stream = api.chat.completions.create(**{**ASKED, "max_tokens": 1500}, stream=True)
        next(stream)
        stopping = threading.Thread(target=lambda: server.call(server.streams.stop()))
        stopping.start()
        runner.steps_allowed.release(1_000_000)
        with pytest.raises(openai.APIError, match="being stopped"):
            list(stream)
        stopping.join()


def test_health_says_how_much_there_is_to_do_while_a_step_runs(stack: tuple[LiveServer, ControlledRunner]) -> None:
    server, runner = stack
    runner.steps_allowed = threading.Semaphore(5)
    with client(server) as api:
        stream = api.chat.completions.create(**ASKED, stream=True)
        next(stream)
        assert httpx.get(f"{server.url}/health").json()["running"] == 1
        runner.steps_allowed.release(1000)
        list(stream)
    until(lambda: httpx.get(f"{server.url}/health").json()["running"] == 0)


def test_a_template_that_is_not_answered_in_time_is_no_fault_of_the_messages(tokenizer: Tokenizer) -> None:
    engine, _ = controlled_engine(tokenizer.vocab_size)
    with (
        ChatTemplateRenderer(seconds=0.0) as hurried,
        LiveServer("hash", engine, tokenizer, hurried) as server,
        client(server) as api,
        pytest.raises(openai.InternalServerError, match="took longer") as failed,
    ):
        api.chat.completions.create(**ASKED)
    assert failed.value.status_code == 503
    assert failed.value.param is None
