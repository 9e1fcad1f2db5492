"""Failed steps, a dead engine, and a stopped engine: which errors clients get, and that other requests are not
affected.
"""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from app.generation.template import ChatTemplateRenderer
from app.text.tokenizer import Tokenizer
from engine.thread import UNKNOWN_SECONDS
from tests.app.server.dialects.openai.test_chat import QUESTION, client, expected_text, joined
from tests.app.server.live_server import Clock, ControlledRunner, LiveServer, controlled_engine
from tests.support.processes import until

ASKED: dict[str, Any] = {"model": "hash", "messages": QUESTION, "max_tokens": 20, "extra_body": {"ignore_eos": True}}


@pytest.fixture
def stack(tokenizer: Tokenizer, renderer: ChatTemplateRenderer) -> Iterator[tuple[LiveServer, ControlledRunner]]:
    """A separate server and its runner, because these tests break them."""
    engine, runner = controlled_engine(tokenizer.vocab_size, budget=64)
    with LiveServer("hash", engine, tokenizer, renderer) as server:
        yield server, runner
    engine.assert_empty()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_failed_first_step_returns_500_and_the_next_request_works(
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


def test_failed_later_step_ends_the_stream_with_an_error_event(
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


def test_error_event_is_the_last_event(stack: tuple[LiveServer, ControlledRunner]) -> None:
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


def test_all_endpoints_return_503_if_the_engine_is_dead(stack: tuple[LiveServer, ControlledRunner]) -> None:
    server, _ = stack
    assert httpx.get(f"{server.url}/health").json() == {
        "status": "ok",
        "running": 0,
        "waiting": 0,
        "running_by_class": {"interactive": 0, "normal": 0, "background": 0},
        "waiting_by_class": {"interactive": 0, "normal": 0, "background": 0},
        "kv_blocks": 4 * 2048 // 16,
        "kv_blocks_held": 0,
    }
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
        until(lambda: server.streams._stopping)
        runner.steps_allowed.release(1_000_000)
        with pytest.raises(openai.APIError, match="stopped this reply"):
            list(stream)
        stopping.join()


def test_health_reports_the_load_during_a_step(stack: tuple[LiveServer, ControlledRunner]) -> None:
    server, runner = stack
    runner.steps_allowed = threading.Semaphore(5)
    with client(server) as api:
        stream = api.chat.completions.create(**ASKED, stream=True)
        next(stream)
        assert httpx.get(f"{server.url}/health").json()["running"] == 1
        runner.steps_allowed.release(1000)
        list(stream)
    until(lambda: httpx.get(f"{server.url}/health").json()["running"] == 0)


def chat(
    server: LiveServer, number: int, *, stream: bool, tokens: int = 1500, begun: threading.Event | None = None
) -> tuple[int, str]:
    """Return the status and the body of a reply. `begun` is set when the first text arrives."""
    messages = [{"role": "user", "content": f"Question {number}"}]
    body = {"model": "hash", "messages": messages, "max_tokens": tokens, "ignore_eos": True, "stream": stream}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=None) as response:  # noqa: S113
        reported = []
        for text in response.iter_text():
            reported.append(text)
            if begun is not None:
                begun.set()
        return response.status_code, "".join(reported)


def test_death_of_the_engine_is_reported_to_all_clients(
    tokenizer: Tokenizer, renderer: ChatTemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four replies run and four wait. Half of them are streamed."""
    engine, runner = controlled_engine(tokenizer.vocab_size, running=4)
    with (
        LiveServer("hash", engine, tokenizer, renderer) as server,
        ThreadPoolExecutor(9) as clients,
        runner.held() as steps,
    ):
        begun = [threading.Event(), threading.Event()]
        running = [clients.submit(chat, server, n, stream=True, begun=event) for n, event in enumerate(begun)]
        running += [clients.submit(chat, server, n, stream=False) for n in (2, 3)]
        server.step_until(steps, running=4, waiting=0)
        steps.release(5)
        until(lambda: all(event.is_set() for event in begun))
        queued = [clients.submit(chat, server, n, stream=n % 2 == 0) for n in range(4, 8)]
        server.step_until(steps, running=4, waiting=4)
        monkeypatch.setattr(engine, "step", lambda: 1 / 0)
        steps.release()
        streamed, whole = [one.result() for one in running[:2]], [one.result() for one in (*running[2:], *queued)]
        refused = [chat(server, 8, stream=stream) for stream in (False, True)]
        health = httpx.get(f"{server.url}/health")
    for status, text in streamed:
        last = text.strip().splitlines()[-1].removeprefix("data: ")
        assert status == 200
        assert "ZeroDivisionError" in json.loads(last)["error"]["message"]
    for _, text in (*whole, *refused):
        assert "ZeroDivisionError" in json.loads(text)["error"]["message"]
    assert [status for status, _ in whole] == [500] * 6
    assert [status for status, _ in refused] == [503] * 2
    assert health.status_code == 503
    assert "ZeroDivisionError" in health.json()["reason"]


@pytest.mark.parametrize("stream", [False, True])
def test_stuck_step_makes_health_unavailable_until_it_ends(
    tokenizer: Tokenizer, renderer: ChatTemplateRenderer, stream: bool
) -> None:
    engine, runner = controlled_engine(tokenizer.vocab_size)
    clock = Clock()

    def health(server: LiveServer) -> tuple[int, str]:
        response = httpx.get(f"{server.url}/health")
        return response.status_code, response.json().get("reason", "")

    with (
        LiveServer("hash", engine, tokenizer, renderer, clock) as server,
        ThreadPoolExecutor(2) as clients,
        runner.held() as steps,
    ):
        asked = clients.submit(chat, server, 1, stream=stream, tokens=50)
        until(lambda: runner.plans == 1)
        clock.seconds += UNKNOWN_SECONDS - 0.1  # just below the limit for the first step, whose duration is unknown
        assert health(server) == (200, "")
        clock.seconds += 0.1
        assert health(server) == (503, "a step has been running for 60 s")
        later = clients.submit(chat, server, 2, stream=stream, tokens=50)
        steps.release(10_000)
        until(lambda: health(server) == (200, ""))
        assert [one.result()[0] for one in (asked, later)] == [200, 200]
        assert health(server) == (200, "")


def test_template_timeout_does_not_blame_the_messages(tokenizer: Tokenizer) -> None:
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
